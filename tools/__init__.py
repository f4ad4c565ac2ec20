"""Programs for developers, such as the trainer of the built-in model, mutation runs and GPU checks. Not installed."""
