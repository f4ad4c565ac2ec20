"""A worker's side: it attaches to a store and holds blocks, while Redis answers and while it does not."""
