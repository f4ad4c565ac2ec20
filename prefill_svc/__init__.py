"""The prefill service, which fills KV blocks for prompts and hands them over. This phase is compute-bound."""
