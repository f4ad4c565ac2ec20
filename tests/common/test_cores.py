"""The number of usable cores: a container's CPU quota counts if it is less than the number of its cores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common import cores


@pytest.mark.parametrize(
    "text, expected",
    [
        ("max 100000", 8),
        ("200000 100000", 2),
        ("250000 100000", 3),
        ("50000 100000", 1),
        ("6400000 100000", 8),
        (None, 8),
    ],
)
def test_the_quota_of_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(cores, "CPU_MAX", tmp_path / "cpu.max")
    if text is not None:
        (tmp_path / "cpu.max").write_text(text + "\n")
    assert cores.usable_cores() == expected
