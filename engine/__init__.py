"""Model execution: model definitions, weights, the step over blocks, sampling. Does not depend on RPC, Redis or the
store."""
