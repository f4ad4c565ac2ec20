"""The service that owns an arena: its sizing, its gRPC service, and fsck."""
