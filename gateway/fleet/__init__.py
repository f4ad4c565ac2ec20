"""Finds workers, chooses workers for requests, calls them, and detects the loss of a worker."""
