"""Recognizes tool calls and reasoning in a model's output, and builds grammars that enforce tool calls."""
