"""The kernels' threads: many callers at once, a caller that forks, more threads than cores."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch

from kernels.rms_norm import rms_norm

ROWS, WIDTH = 4000, 64
pytestmark = pytest.mark.usefixtures("native_isa")


@pytest.fixture
def many_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(5)
    yield
    torch.set_num_threads(before)


def _norm(x: torch.Tensor) -> torch.Tensor:
    return rms_norm(x, torch.ones(WIDTH), 1e-5)


def _alone(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([_norm(part) for part in x.split(100)])  # too small for a second thread


@pytest.mark.usefixtures("many_threads")
def test_callers_at_once_each_get_their_own() -> None:
    inputs = [torch.randn(ROWS, WIDTH) for _ in range(4)]
    wanted = [_alone(x) for x in inputs]
    wrong: list[int] = []

    def call(number: int) -> None:
        for _ in range(200):
            if not torch.equal(_norm(inputs[number]), wanted[number]):
                wrong.append(number)

    callers = [threading.Thread(target=call, args=(number,)) for number in range(len(inputs))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(200.0)
    assert not any(caller.is_alive() for caller in callers)
    assert not wrong


@pytest.mark.usefixtures("many_threads")
def test_a_forked_child_computes_with_threads_of_its_own() -> None:
    x = torch.randn(ROWS, WIDTH)
    wanted = _norm(x).numpy().tobytes()  # starts the parent's threads
    child = os.fork()
    if child == 0:  # must not use torch's OpenMP threads, which do not survive a fork
        same = False
        try:
            same = _norm(x).numpy().tobytes() == wanted and len(os.listdir("/proc/self/task")) > 1
        finally:
            os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
