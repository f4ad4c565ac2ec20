"""Benchmarks that look into a decode worker's blocks, step by step, while a whole stack serves real requests."""
