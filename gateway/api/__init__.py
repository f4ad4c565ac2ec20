"""The interfaces that clients use: an OpenAI-compatible HTTP API, gRPC, API keys and the listening server."""
