"""The ranks of a worker: processes that share its model by tensor or pipeline parallelism (docs/parallel.md)."""
