"""The targets of the mutation job are existing files, and its scratch trees are complete."""

from __future__ import annotations

import tomllib
from pathlib import Path

from tools.mutants.__main__ import scratch
from tools.mutants.targets import TARGETS

ROOT = Path(__file__).parents[2]


def test_its_files_and_tests_exist() -> None:
    named = [name for target in TARGETS for name in (*target.files, *target.tests)]
    assert len(named) > 30
    assert not [name for name in named if not (ROOT / name).is_file()]


def test_a_scratch_tree_has_every_package(tmp_path: Path) -> None:
    tree = scratch(tmp_path / "tree")
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["root_packages"]
    assert "worker" in packages and [name for name in packages if not (tree / name).is_dir()] == []
