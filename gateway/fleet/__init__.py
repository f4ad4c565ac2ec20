"""The gateway's side of the workers: discovery, routing, streams, and the loss of a worker."""
