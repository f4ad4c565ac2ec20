"""The backend over transformers: its model definitions, with our attention over blocks and our linear layers."""
