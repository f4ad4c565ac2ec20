"""The disk tier, which keeps copies of sealed blocks on disk and restores them into an arena."""
