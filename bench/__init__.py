"""Benchmarks of Looseleaf, from one kernel to a served system. Not installed."""
