"""The targets of the mutation job are existing files."""

from __future__ import annotations

from pathlib import Path

from tools.mutants.targets import TARGETS

ROOT = Path(__file__).parents[2]


def test_its_files_and_tests_exist() -> None:
    named = [name for target in TARGETS for name in (*target.files, *target.tests)]
    assert len(named) > 30
    assert not [name for name in named if not (ROOT / name).is_file()]
