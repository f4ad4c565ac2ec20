"""The ranks of a worker: processes that share its model by tensor parallelism (docs/parallel.md)."""
