"""The version of all services."""

VERSION = "0.1.0"
