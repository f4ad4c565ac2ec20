"""Contains one module for each command of `looseleaf`, with a function `run(argv) -> exit status`. The module `options`
defines flags that several commands share.
"""
