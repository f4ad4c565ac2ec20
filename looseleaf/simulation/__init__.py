"""A simulator: the real schedulers, admission and router, with a clock and workers of its own."""
