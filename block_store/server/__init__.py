"""The service that owns an arena: sizing, the gRPC service, and fsck."""
