"""Compute: model definitions, weights, the step over blocks, sampling. Independent of RPC, Redis and the store."""
