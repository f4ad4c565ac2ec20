"""Simulates a deployment with the real schedulers, admission and router, but a virtual clock and simulated workers."""
