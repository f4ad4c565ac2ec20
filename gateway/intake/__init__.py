"""From what a client sent to a request that can be run: limits, templates, tokens."""
