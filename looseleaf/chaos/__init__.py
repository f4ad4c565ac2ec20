"""The chaos suite: real processes, real signals, seeded schedules, every answer compared with the oracle.

`python -m looseleaf.chaos --scenario all` runs every scenario at its full count and prints one table.
"""
