"""What clients talk to: HTTP as OpenAI's, gRPC, keys, the listening server."""
