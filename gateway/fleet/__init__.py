"""The workers: discovery, routing, the streams to them, and what became of lost ones."""
