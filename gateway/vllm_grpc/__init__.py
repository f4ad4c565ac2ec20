"""vLLM's gRPC protocol (`vllm.grpc.engine.VllmEngine`), for routers such as SMG that speak it to their workers."""
