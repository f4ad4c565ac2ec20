"""The chaos suite: real processes, real signals and seeded schedules. Every answer is compared with the oracle.

`python -m testing.chaos --scenario all` runs every scenario at its full count and prints one table.
"""
