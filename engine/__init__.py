"""Compute: model definitions, weights, the step over blocks, sampling. Knows no RPC, no Redis, no store."""
