"""The compute-bound half of Looseleaf: fills KV blocks for prompts and hands them over."""
