"""Runs a request, from its admission to its last token: attempts, text, stop strings, isolation."""
