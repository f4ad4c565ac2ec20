"""The arena, the memory of a device's KV blocks, with its header and its writer slots."""
