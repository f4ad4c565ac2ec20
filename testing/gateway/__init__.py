"""Code for tests of the gateway: workers that follow a script, so that the gateway runs without real workers."""
