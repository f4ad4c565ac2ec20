"""This package stores KV blocks. It contains the arena in shared or device memory, the ledger of references in Redis,
the worker's side, and the service that owns the arena.
"""
