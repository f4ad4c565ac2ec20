"""Contains one module for each command of `looseleaf`, with a function `run(argv) -> exit status`, and the flags that
they share.
"""
