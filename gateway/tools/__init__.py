"""Tool calls and reasoning in a model's output: how they are recognized, and how they are enforced."""
