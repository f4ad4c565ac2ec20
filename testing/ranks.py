"""The ranks of a worker as threads of this process, for tests of their numbers. They have the same sockets, exchanges
and shares as processes, and start at once. `followers_of` finds the processes of real ranks.
"""

from __future__ import annotations

import socket
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from engine.model_runner import ModelRunner, RunnerSettings
from engine.ranks.messages import SharedBlocks
from engine.ranks.seat import Seat
from engine.ranks.shard import Shard
from engine.step import StepInput

_ANYWHERE = SharedBlocks("", 0, 0, 0)
"""Threads share the memory itself."""


class _FirstSeat(Seat):
    """The place of the first rank, which gives each step to the threads of the others."""

    followers: list[ModelRunner]
    threads: ThreadPoolExecutor
    running: list[Future[Tensor]]

    def _announce(self, batch: StepInput, has_head: bool) -> None:
        self.running = [
            self.threads.submit(runner.step if has_head else runner.hidden_states, batch) for runner in self.followers
        ]


class ThreadRanks:
    """Runners of all ranks. `runner` is the first one's, to be used like any other."""

    def __init__(self, settings: RunnerSettings, size: int) -> None:
        table: list[list[socket.socket | None]] = [[None] * size for _ in range(size)]
        for one in range(size):
            for other in range(one):
                table[one][other], table[other][one] = socket.socketpair()
        self._settings = replace(settings, tensor_parallel_size=size, num_threads=size)
        shards = [Shard.of(rank, size, settings.reduction_parts) for rank in range(size)]
        first = _FirstSeat(shards[0], table[0])
        self.runner = ModelRunner(self._settings, seat=first)
        seats = [Seat(shard, peers) for shard, peers in zip(shards[1:], table[1:], strict=True)]
        first.followers = [ModelRunner(self._settings, seat=seat) for seat in seats]
        first.threads = ThreadPoolExecutor(size)
        self._first, self._sockets = first, [end for row in table for end in row if end is not None]

    def bind(self, arena: Tensor) -> None:
        """Binds the memory to all ranks."""
        for runner in (self.runner, *self._first.followers):
            runner.bind(arena, _ANYWHERE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._first.threads.shutdown()
        for end in self._sockets:
            end.close()


def shared_arena(runner: ModelRunner, path: Path, num_blocks: int) -> None:
    """Binds an arena in a new file, which is NaN in every dtype, to a runner and its followers."""
    size = runner.layout.block_bytes
    path.write_bytes(b"\xff" * (num_blocks * size))
    blocks = SharedBlocks(str(path), 0, num_blocks, size)
    runner.bind(torch.from_numpy(blocks.map()), blocks)


def followers_of(pid: int) -> list[int]:
    """Returns the process ids of a worker's ranks, without the first."""
    children = " ".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")).split()
    return [int(child) for child in children if b"engine.ranks.follower" in Path(f"/proc/{child}/cmdline").read_bytes()]
