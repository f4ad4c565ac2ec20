"""Errors of a model directory, and of the ranks that share a model. A message is one sentence. It names the file,
tensor, setting or feature concerned.
"""

from __future__ import annotations

from typing import Any

from common.errors import StartupError


class ModelError(StartupError):
    """Raised if a model cannot be loaded."""


class UnsupportedModel(ModelError):
    """Raised if a checkpoint can be read, but has an architecture or a feature that this version does not support."""


class RankLost(Exception):
    """Raised if a rank of a worker has ended, is frozen, or is no longer at the same step. The worker must end."""


def refuse_unless(raw: dict[str, Any], name: str, *allowed: object) -> None:
    """Raises UnsupportedModel if a setting that affects the results has a value that is not supported. The first
    allowed value is the default.
    """
    value = raw.get(name, allowed[0])
    if value not in allowed:
        raise UnsupportedModel(f"{name}={value!r} is not supported; only {allowed[0]!r} is")
