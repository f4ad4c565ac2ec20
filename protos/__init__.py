"""Schema and generated code."""
