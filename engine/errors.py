"""What can be wrong with a model directory; every message is one sentence that names the file, tensor or setting."""

from __future__ import annotations

from common.errors import StartupError


class ModelError(StartupError):
    """A model that cannot be loaded."""


class UnsupportedModel(ModelError):
    """A readable checkpoint of an architecture, or with a feature, that this version does not run."""
