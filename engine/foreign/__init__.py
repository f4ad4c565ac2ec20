"""The transformers backend, which runs transformers' model definitions with our attention and our linear layers."""
