"""The choice of Redis, and the registry of workers and stores that Redis contains."""
