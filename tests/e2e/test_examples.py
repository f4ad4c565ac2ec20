"""Every script in `examples/` runs as its first line describes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from looseleaf import LLM

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
TALKERS = {
    "complete": ("grpc", r"prompt tokens, \d+ of them cached"),
    "chat": ("http", r"(?s)> Tell me a story.*> Tell me another one.*\[\d+ prompt tokens, [1-9]\d* cached\]"),
    "samples_and_beams": ("grpc", r"(?s)sample 3: .*beam -?\d+\.\d+: .*beam -?\d+\.\d+: "),
    "plain_grpc": ("grpc", r"32 tokens in \d+ ms"),
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM() as llm:
        yield llm


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", TALKERS)
def test_an_example_talks_to_a_running_server(llm: LLM, name: str) -> None:
    kind, expected = TALKERS[name]
    said = run(name, llm.addresses.grpc if kind == "grpc" else f"http://{llm.addresses.http}/v1")
    assert re.search(expected, said), said


def test_a_second_run_finds_the_prompt_in_the_cache(llm: LLM) -> None:
    said = [run("complete", llm.addresses.grpc) for _ in range(2)]
    assert re.search(r"prompt tokens, [1-9]\d* of them cached", said[1]), said


def test_the_node_example_streams(llm: LLM) -> None:
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("there is no npm or no node")
    install = ["npm", "install", "--silent", "--no-fund", "--no-audit", "--no-package-lock", "--prefix", str(EXAMPLES)]
    if subprocess.run(install, capture_output=True, timeout=120, check=False).returncode != 0:
        pytest.skip("npm cannot install the example's packages")
    command = ["node", str(EXAMPLES / "stream.mjs"), llm.addresses.grpc]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"(?s)\w+.*\n32 tokens", done.stdout), done.stdout


def test_the_offline_example_starts_what_it_needs() -> None:
    assert len(re.findall(r"' -> '.+'", run("offline"))) == 3


def test_every_example_is_run_here_and_listed() -> None:
    names = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".mjs", ".go")}
    talkers = {f"{name}.py" for name in TALKERS}
    assert names == {*talkers, "offline.py", "stream.mjs", "stream.go", "tools.py"}
    # tests/e2e/test_tools.py runs "tools", and tests/third_party runs the Go example
    assert set(re.findall(r"\]\((\w+\.\w+)\)", (EXAMPLES / "README.md").read_text())) == names
