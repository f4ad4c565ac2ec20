"""What can be wrong with a model directory; every message is one sentence that names the file, tensor or setting."""

from __future__ import annotations

from typing import Any

from common.errors import StartupError


class ModelError(StartupError):
    """A model that cannot be loaded."""


class UnsupportedModel(ModelError):
    """A readable checkpoint of an architecture, or with a feature, that this version does not run."""


def refuse_unless(raw: dict[str, Any], name: str, *allowed: object) -> None:
    """Refuse a setting whose value changes the numbers in a way we do not compute. The first allowed is the default."""
    value = raw.get(name, allowed[0])
    if value not in allowed:
        raise UnsupportedModel(f"{name}={value!r} is not supported; supported is {allowed[0]!r}")
