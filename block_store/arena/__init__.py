"""The arena: the block memory of a device, with its header and its writer slots."""
