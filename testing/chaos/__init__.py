"""The chaos suite disturbs real processes on seeded schedules, and compares the answers to requests with the oracle's.

`python -m testing.chaos --scenario all` runs every scenario with its default number of trials, and prints a table for
each.
"""
