"""The service that owns an arena, and `fsck`, which checks the arena and its ledger."""
