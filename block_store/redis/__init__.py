"""The connection to Redis, and the registries of workers, stores and adapters in it."""
