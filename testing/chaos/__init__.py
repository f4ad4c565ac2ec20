"""The chaos suite sends signals to real processes on seeded schedules, and compares every answer with the oracle's.

`python -m testing.chaos --scenario all` runs every scenario with its default number of trials, and prints a table for
each.
"""
