"""The prefill service, the compute-bound phase: it fills KV blocks for prompts and hands them over."""
