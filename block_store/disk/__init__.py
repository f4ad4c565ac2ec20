"""The disk tier, which keeps copies of sealed blocks on disk, from which they can be restored into an arena."""
