"""Turns what a client sent into a request that can run: limits, templates, tokens."""
