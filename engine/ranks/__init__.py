"""The ranks of a worker, which are processes that share its model (docs/parallel.md)."""
