"""Code for tests of the gateway without real workers: workers that follow a script."""
