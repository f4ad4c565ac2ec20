"""Defines the operator's options for the HTTP API."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """The options of one gateway's HTTP API."""

    strict_fields: bool = False
    """Whether unknown fields are refused."""
    origins: tuple[str, ...] = ()
    """The origins whose pages may call the API."""
    describe: bool = True
    """Whether /openapi.json and /docs are served."""
    page: bool = True
    """Whether the page at / is served."""


DEFAULT_OPTIONS = HttpOptions()
