"""Code for tests of the gateway with workers that follow a script."""
