"""The disk tier: copies of sealed blocks in a file, from which they can be restored into an arena."""
