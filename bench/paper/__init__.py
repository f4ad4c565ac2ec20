"""Repeats measurements from the literature on LLM serving (`make paper`).

Each module listed in `parts.PARTS` defines one measurement. Its function `measure` makes the measurement and returns a
JSON value, and `section` turns that value into a section of the page docs/paper/README.md.
"""
