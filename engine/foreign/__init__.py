"""The transformers backend: model definitions of transformers, with our attention over blocks and our linear layers."""
