"""The errors for a model that cannot be loaded and for a lost rank."""

from __future__ import annotations

from typing import Any

from common.errors import StartupError


class ModelError(StartupError):
    """Raised if a model cannot be loaded."""


class UnsupportedModel(ModelError):
    """Raised if a checkpoint has an architecture or a feature that is not supported."""


class RankLost(Exception):
    """Raised if a rank of a worker has ended, is frozen, or has failed to load the model or compute a step. After such
    a failure, the ranks may be at different steps, so the worker must end.
    """


def refuse_unless(raw: dict[str, Any], name: str, *allowed: object) -> None:
    """Raises UnsupportedModel if the field `name` of `raw` does not have an allowed value. The first allowed value is
    the default.
    """
    value = raw.get(name, allowed[0])
    if value not in allowed:
        raise UnsupportedModel(f"{name}={value!r} is not supported; only {allowed[0]!r} is")
