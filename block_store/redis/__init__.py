"""Which Redis is used, and the registry of workers and stores in it."""
