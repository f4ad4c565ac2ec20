"""The disk tier: copies of sealed blocks in a file, from which they come back into an arena."""
