"""Storage of KV blocks: arena in shared memory, ledger of references in Redis, the service that owns both."""
