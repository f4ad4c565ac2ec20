"""One module per sub-command of `looseleaf`; each has `run(argv) -> exit status`."""
