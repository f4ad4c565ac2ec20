"""Benchmarks of a whole stack that serves real requests. Some inspect a decode worker's blocks after every step."""
