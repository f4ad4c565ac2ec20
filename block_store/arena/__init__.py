"""The arena: a device's block memory, its header, the writer slots beside it."""
