"""What `pip install looseleaf` brings: the packages that a user needs, with schema, scripts and sources."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "block_store", "common", "decode_svc", "engine", "gateway", "kernels", "looseleaf", "prefill_svc", "protos",
    "worker",
}  # fmt: skip


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Files in the wheel of what the repository tracks; nothing is compiled."""
    source, wheels = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheels")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    for name in listed:
        if name and not name.startswith(("docs/", "models/")) and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(wheels),
        ".",
    ]
    subprocess.run(command, cwd=source, env=os.environ | {"NO_EXTENSIONS": "1"}, check=True, timeout=120)
    [wheel] = wheels.iterdir()
    return zipfile.ZipFile(wheel).namelist()


def test_only_the_packages_that_a_user_needs_are_installed(names: list[str]) -> None:
    assert {name.split("/")[0] for name in names if "dist-info" not in name} == PACKAGES


def test_what_is_read_at_run_time_is_there(names: list[str]) -> None:
    tracked = [
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for suffix in ("py", "lua", "proto", "cpp", "c", "h", "typed")
        for path in (ROOT / package).rglob(f"*.{suffix}")
    ]
    missing = sorted(set(tracked) - set(names))
    assert not missing and any(name.endswith("LICENSE") for name in names)


def test_the_build_context_of_images_has_what_the_wheel_is_built_from() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().split("\n") if line.startswith("!")}
    assert allowed == PACKAGES | {"pyproject.toml", "setup.py", "README.md", "LICENSE"}
