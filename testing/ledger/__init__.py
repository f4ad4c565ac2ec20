"""Code for tests of the ledger: random walks, an exhaustive search of a small world, and faulty writers."""
