"""Parts for tests of the gateway: workers that follow a script, so that its parts run without real workers."""
