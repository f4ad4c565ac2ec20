"""The worker's side of the block store: attaching to a store and holding blocks, with or without Redis."""
