"""Code for tests of promise 1 (docs/design.md): on every path, a request has the same answer as in a single process
without batching.
"""
