"""A process's place among the ranks of its worker: its share of the model, and its connections to the other ranks.

The kernels exchange partial sums over these connections in the middle of a step (kernels/cpu/row_parallel.cpp); here,
the ranks hand their part of the logits to the first one at the end of it. They are sockets of one machine, because all
ranks map the same arena.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.errors import RankLost
from engine.ranks.messages import receive_exactly
from engine.ranks.shard import Shard
from engine.step import StepInput
from kernels.cpu.ranks import Ranks

_DONE = b"\0"


class Seat:
    """One rank. A step runs on all ranks at the same time, and only one step at a time."""

    def __init__(self, shard: Shard, peers: Sequence[socket.socket | None]) -> None:
        """peers: a stream socket to each rank, None for this one."""
        self.shard = shard
        self.ranks = Ranks.of([-1 if peer is None else peer.fileno() for peer in peers], shard.rank)
        self._peers = peers
        self._lock = threading.Lock()

    def run(self, batch: StepInput, compute: Callable[[], Tensor], vocab_size: int | None, *, alone: bool) -> Tensor:
        """Computes a step on all ranks, of which this one runs `compute`. If `vocab_size` is given, the results are the
        ranks' parts of logits, fp32 [R, part], and the first rank returns logits [R, vocab]. When it returns, no rank
        reads or writes blocks for this step any more.

        alone: the step is a rehearsal over memory of this rank alone. Nothing is exchanged, and the values of the
        result mean nothing.

        Raises RankLost for any error, because the ranks are then no longer at the same place.
        """
        with self._lock:
            self.ranks.rehearses = int(alone)
            if alone:
                return self._padded(compute(), vocab_size)
            try:
                self._announce(batch, vocab_size is not None)
                return self._collect(compute(), vocab_size)
            except Exception as error:
                raise RankLost(f"a step of {self.shard.size} ranks failed ({error})") from error

    def _announce(self, batch: StepInput, has_head: bool) -> None:
        """The first rank sends the step to the others. They have received it already."""

    def _collect(self, own: Tensor, vocab_size: int | None) -> Tensor:
        """Ends a step: waits until every rank is done, and puts logits together."""
        if self.shard.rank:
            first = self._peers[0]
            assert first is not None
            part = own.contiguous().numpy().tobytes() if vocab_size is not None else b""
            first.sendall(_DONE + part)
            return own
        logits = own if vocab_size is None else own.new_empty((len(own), vocab_size))
        if vocab_size is not None:
            logits[:, self.shard.span(vocab_size)] = own
        for rank, peer in enumerate(self._peers):
            if peer is not None:
                receive_exactly(peer, len(_DONE))
                if vocab_size is not None and len(own):
                    span = self.shard.span(vocab_size, rank)
                    body = receive_exactly(peer, len(own) * (span.stop - span.start) * own.element_size())
                    logits[:, span] = torch.frombuffer(body, dtype=own.dtype).view(len(own), -1)
        return logits

    def _padded(self, own: Tensor, vocab_size: int | None) -> Tensor:
        if vocab_size is None:
            return own
        return torch.nn.functional.pad(own, (0, vocab_size - own.shape[1]))
