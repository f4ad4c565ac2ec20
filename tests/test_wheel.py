"""The contents of the wheel: the packages that a user needs, with schema, scripts and sources."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from kernels.cpu import loader
from looseleaf import LLM

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "block_store", "common", "decode_svc", "engine", "gateway", "kernels", "looseleaf", "prefill_svc", "protos",
    "worker",
}  # fmt: skip


def tracked() -> list[str]:
    """Copies the tracked files in their current state, without docs."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return [name for name in listed if name and not name.startswith("docs/") and (ROOT / name).is_file()]


def copy_from_root(name: str, directory: Path) -> None:
    """Copies a file of the repository under the same name into a directory."""
    (directory / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / name, directory / name)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the tracked files, built as by `make wheel`, but with the libraries that `make dev` has compiled from
    them: compiling takes minutes.
    """
    source, wheels = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheels")
    for name in tracked():
        copy_from_root(name, source)
    compiled = source / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    for library in [*ROOT.glob("kernels/_cpu_*.so"), *ROOT.glob("block_store/arena/*.so")]:
        copy_from_root(str(library.relative_to(ROOT)), compiled)  # newer than its sources, so setuptools keeps it
    command = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--no-build-isolation", "-w", str(wheels), "."]
    subprocess.run(command, cwd=source, check=True, timeout=600)
    [built] = wheels.iterdir()
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> list[str]:
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


def test_it_has_the_kernels_of_every_instruction_set_and_the_built_in_model(names: list[str]) -> None:
    built = {name.removeprefix("kernels/_cpu_").split(".")[0] for name in names if name.startswith("kernels/_cpu_")}
    assert built == ({"portable", "avx2", "avx512", "amx"} if platform.machine() == "x86_64" else {"portable"})
    model = {name.removeprefix("looseleaf/storyteller/") for name in names if "looseleaf/storyteller/" in name}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= model


SPEAK = """
import json
import kernels.cpu, looseleaf
if __name__ == "__main__":
    with looseleaf.LLM() as llm:
        [done] = llm.generate(["Once upon a time"], max_tokens=16, temperature=0.0)
    print(json.dumps({"at": kernels.__file__, "isa": kernels.cpu.load().isa, "text": done.text}))
"""


def test_installed_without_a_compiler_it_serves_with_its_own_kernels(wheel: Path, tmp_path: Path) -> None:
    """The new environment has the dependencies of this one, but neither this checkout nor a compiler."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=60)
    python, [site] = venv / "bin" / "python", venv.glob("lib/python3*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")  # without its editable installs
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-qq", "--no-deps", str(wheel)]
    subprocess.run(install, check=True, timeout=120)
    env = {"PATH": str(venv / "bin"), "HOME": str(tmp_path), "CC": "/nowhere", "CXX": "/nowhere"}
    (tmp_path / "speak.py").write_text(SPEAK)
    ran = subprocess.run([python, "speak.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=180)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout.splitlines()[-1])
    assert told["at"].startswith(str(site)) and told["isa"] == loader.best_isa() != "reference"
    with LLM() as llm:
        [done] = llm.generate(["Once upon a time"], max_tokens=16, temperature=0.0)
    assert told["text"] == done.text


def test_the_build_context_of_images_has_what_the_wheel_is_built_from() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().split("\n") if line.startswith("!")}
    assert allowed == PACKAGES | {"pyproject.toml", "setup.py", "README.md", "LICENSE"}
