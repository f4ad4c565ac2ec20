"""Fixtures of the Triton kernel tests: the device, and counts of the kernels that were run and compiled. Without a CUDA
device, the kernels run in triton's interpreter, which must be selected before triton is first imported. This file is
read before any test runs, and no other file in `tests` imports triton during collection.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from testing.gpu_kernels import keep_rows

HAS_TRITON = find_spec("triton") is not None
HAS_CUDA = torch.cuda.is_available()
IMPORTED_TOO_EARLY = "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1"

if HAS_TRITON and not HAS_CUDA and not IMPORTED_TOO_EARLY:
    os.environ["TRITON_INTERPRET"] = "1"

collect_ignore_glob = [] if HAS_TRITON else ["test_*.py"]
compiled: Counter[str] = Counter()


def _numbers(package: str) -> tuple[int, int]:
    major, minor, *_ = version(package).split(".")
    return int(major), int(minor)


CANNOT_LOOP = HAS_TRITON and not HAS_CUDA and _numbers("triton") < (3, 7) and _numbers("numpy") >= (2, 4)
"""Whether the interpreter has triton's issue 9171 (fixed in 3.7): a loop with a bound that is not constant fails."""


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not HAS_TRITON:
        terminalreporter.write_line("triton kernels: not tested, triton is not installed (pip install looseleaf[dev])")
    if compiled:
        each = ", ".join(f"{name} {count}" for name, count in sorted(compiled.items()))
        terminalreporter.write_line(f"triton: {len(compiled)} kernels, {compiled.total()} variants compiled: {each}")


@pytest.fixture(scope="session")
def device() -> str:
    """ "cuda" if there is a GPU, else "cpu", with the interpreter."""
    if HAS_CUDA:
        return "cuda"
    if IMPORTED_TOO_EARLY:
        pytest.skip("triton was imported before TRITON_INTERPRET could be set, so kernels cannot be interpreted")
    if CANNOT_LOOP:
        pytest.skip("the interpreter of triton 3.6 needs numpy below 2.4")
    keep_rows()
    return "cpu"


@pytest.fixture(scope="session")
def compile_cases() -> Callable[[Iterable[Any]], list[Any]]:
    """`kernels.gpu.compile.compile_cases`, whose calls are counted for the summary."""
    from kernels.gpu import compile as harness

    def run(cases: Iterable[harness.Case]) -> list[harness.Resources]:
        listed = list(cases)
        found = harness.compile_cases(listed)
        compiled.update(case.kernel.partition(":")[2] for case in listed)
        return found

    return run
