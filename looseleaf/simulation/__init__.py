"""A simulator: the real schedulers, admission and router, with a simulated clock and simulated workers."""
