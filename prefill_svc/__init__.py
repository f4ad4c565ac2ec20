"""The prefill service, which fills KV blocks for prompts and hands them over to decode."""
