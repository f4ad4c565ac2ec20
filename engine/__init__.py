"""Model execution: model definitions, weights, the step over blocks, and sampling."""
