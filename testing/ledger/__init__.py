"""Code for tests of the ledger: random walks, an exhaustive small world, faulty writers."""
