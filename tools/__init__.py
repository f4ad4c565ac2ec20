"""Programs for developers: the trainer of the built-in model, mutation runs, GPU checks. Not installed."""
