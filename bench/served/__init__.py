"""Benchmarks of a complete deployment that serves real requests."""
