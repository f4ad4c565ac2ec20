"""Runs a request, from its admission to its last token, and converts the tokens to text."""
