"""Tests of the gateway: its parts without workers, and workers that follow a script."""
