"""The bookkeeping of graph captures, with a stand-in for torch's allocator that has the same rules for pools."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.device import CudaDevice


class Allocator:
    """An allocator whose graph memory pools behave like those of torch 2.11 and 2.13."""

    def __init__(self) -> None:
        self.recording: set[int] = set()
        self.made = 0
        self.refuses = False

    def new_pool(self) -> int:
        self.made += 1
        return self.made

    @contextlib.contextmanager
    def graph(self, graph: Graph, *, pool: int, **_: Any) -> Iterator[None]:
        if pool in self.recording:
            raise RuntimeError(f"beginAllocateToPool: already recording to mempool_id {pool}")
        self.recording.add(pool)
        yield  # if the work or the end of the capture raises, the pool stays as it is
        if self.refuses:
            raise torch.AcceleratorError("operation failed due to a previous error during capture")
        self.recording.remove(pool)
        graph.found = pool

    def end(self, device: int, pool: int) -> None:
        if pool not in self.recording:
            raise RuntimeError("endAllocateToPool: not currently recording")
        self.recording.remove(pool)


class Graph:
    found = 0

    def pool(self) -> int:
        return self.found

    def replay(self) -> None:
        pass


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    made = Allocator()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", made.graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", made.new_pool)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", made.end, raising=False)
    return made


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    made = object.__new__(CudaDevice)
    made.torch_device, made._stream, made._newest = torch.device("cuda", 0), None, lambda: None  # type: ignore[assignment]
    monkeypatch.setattr(made, "wait", lambda: None)
    return made


def test_graphs_share_a_pool_while_one_of_them_lives(device: CudaDevice, allocator: Allocator) -> None:
    first, second = (device.record(lambda: torch.ones(1)) for _ in range(2))
    assert allocator.made == 1
    del first, second
    device.record(lambda: torch.ones(1))
    assert allocator.made == 2


@pytest.mark.parametrize("where", ["work", "end"])
def test_a_failed_capture_leaves_no_pool_behind(where: str, device: CudaDevice, allocator: Allocator) -> None:
    kept = device.record(lambda: torch.ones(1))
    calls = []

    def work() -> torch.Tensor:
        calls.append(1)
        if where == "work" and len(calls) == 2:  # the first call is eager
            raise ValueError("out of resource: shared memory")
        return torch.ones(1)

    allocator.refuses = where == "end"
    with pytest.raises(ValueError if where == "work" else torch.AcceleratorError):
        device.record(work)
    assert not allocator.recording
    allocator.refuses = False
    assert device.record(lambda: torch.full((1,), 7.0))() == 7 and kept() == 1
    assert allocator.made == 2 and not allocator.recording
