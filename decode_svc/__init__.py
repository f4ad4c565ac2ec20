"""The decode service, the memory-bound phase: it takes over block tables and produces tokens."""
