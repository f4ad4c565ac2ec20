"""Stores KV blocks in an arena in shared or device memory, and records the references to them in a ledger in Redis."""
