"""Repeats measurements from the literature on LLM serving (`make paper`).

Each module listed in `parts.PARTS` is one measurement: `measure` makes it and returns a JSON value, and `section`
turns that value into a part of the page docs/paper/README.md.
"""
