"""Plants a bug in a method, to show that a test notices it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest


def plant(monkeypatch: pytest.MonkeyPatch, owner: type, method: str, right: str, wrong: str) -> None:
    """Replaces a method of the class `owner` by that of its module's source with `right` replaced by `wrong`. `right`
    must occur exactly once in the source.
    """
    module = owner.__module__
    source = Path(str(sys.modules[module].__file__)).read_text()
    assert source.count(right) == 1, "the bug cannot be planted any more"
    namespace: dict[str, Any] = {"__name__": module}
    exec(compile(source.replace(right, wrong), module, "exec"), namespace)
    monkeypatch.setattr(owner, method, vars(namespace[owner.__name__])[method])
