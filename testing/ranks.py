"""Runs the ranks of a worker as threads of this process, for tests of their results. The ranks exchange data over
sockets and hold shares of the weights, as processes do.
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
from engine.ranks.place import Place
from engine.ranks.seat import Seat
from engine.step import StepInput
from testing.engine import Batch

PROMPTS = [[5 + (7 * i + j) % 500 for j in range(length)] for i, length in enumerate((1, 15, 16, 37, 90))]
_ANYWHERE = SharedBlocks("", 0, 0, 0)
"""A placeholder, because the threads share the arena's memory."""


class _FirstSeat(Seat):
    """The seat of the first rank, which passes each step to the threads of the other ranks."""

    followers: list[ModelRunner]
    threads: ThreadPoolExecutor
    running: list[Future[Tensor]]

    def _announce(self, batch: StepInput, has_head: bool) -> None:
        self.running = [
            self.threads.submit(runner.step if has_head else runner.hidden_states, batch) for runner in self.followers
        ]


class ThreadRanks:
    """The runners of all ranks of a worker. `runner` is the runner of the first rank, and can be used like any other
    runner.
    """

    def __init__(self, settings: RunnerSettings, size: int, stages: int = 1) -> None:
        """Starts the ranks of `stages` stages. `size` is the number of ranks of each stage."""
        settings = replace(settings, tensor_parallel_size=size, pipeline_parallel_size=stages)
        size *= stages
        table: list[list[socket.socket | None]] = [[None] * size for _ in range(size)]
        for one in range(size):
            for other in range(one):
                table[one][other], table[other][one] = socket.socketpair()
        self._settings = replace(settings, num_threads=size)
        places = [Place.of(rank, self._settings) for rank in range(size)]
        first = _FirstSeat(places[0], table[0])
        self.runner = ModelRunner(self._settings, seat=first)
        seats = [Seat(place, peers) for place, peers in zip(places[1:], table[1:], strict=True)]
        first.followers = [ModelRunner(self._settings, seat=seat) for seat in seats]
        first.threads = ThreadPoolExecutor(size)
        self._first, self._sockets = first, [end for row in table for end in row if end is not None]

    @property
    def runners(self) -> list[ModelRunner]:
        """The runners of all ranks, by rank."""
        return [self.runner, *self._first.followers]

    def bind(self, arena: Tensor) -> None:
        """Binds the arena to the runners of all ranks."""
        for runner in self.runners:
            runner.bind(arena, _ANYWHERE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._first.threads.shutdown()
        for end in self._sockets:
            end.close()


def logits_of(runner: ModelRunner, ranks: ThreadRanks | None, budget: int) -> list[Tensor]:
    """Generates five tokens for each of `PROMPTS`, in steps of at most `budget` tokens, over a new arena. Returns the
    logits [5, vocab] of each prompt. `ranks` are the ranks to which the runner belongs, or None for a single process.
    """
    batch = Batch.of(runner, PROMPTS, 5, budget=budget)
    if ranks is not None:
        ranks.bind(runner.bound_arena)
    batch.run()
    return [torch.stack(rows) for rows in batch.logits]


def shared_arena(runner: ModelRunner, path: Path, num_blocks: int) -> None:
    """Creates an arena in a new file, filled with NaN, and binds it to a runner and its followers."""
    size = runner.layout.block_bytes
    path.write_bytes(b"\xff" * (num_blocks * size))
    blocks = SharedBlocks(str(path), 0, num_blocks, size)
    runner.bind(torch.from_numpy(blocks.map()), blocks)


def followers_of(pid: int) -> list[int]:
    """Returns the process ids of a worker's ranks other than the first."""
    children = " ".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")).split()
    return [int(child) for child in children if b"engine.ranks.follower" in Path(f"/proc/{child}/cmdline").read_bytes()]
