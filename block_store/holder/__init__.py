"""The worker's side of the block store, which attaches a worker to a store and records the blocks that the worker
holds.
"""
