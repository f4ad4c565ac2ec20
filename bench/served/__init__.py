"""Benchmarks of a whole stack that serves real requests. Some of them record a decode worker's blocks after every
step.
"""
