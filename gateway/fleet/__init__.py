"""The workers: discovery, routing, the streams to them, and lost workers."""
