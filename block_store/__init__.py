"""Storage of KV blocks: an arena in shared or device memory, a ledger of references in Redis, and the service that owns
both.
"""
