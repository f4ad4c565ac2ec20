"""Turns client input into a request that can run: limits, templates, tokens."""
