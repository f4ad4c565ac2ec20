"""The service that clients talk to: gRPC and OpenAI HTTP, tokenizing, limits, routing, streams, metrics. No torch."""
