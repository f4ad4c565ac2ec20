"""The interfaces for clients: HTTP APIs compatible with OpenAI's, Anthropic's and vLLM's, and a gRPC API."""
