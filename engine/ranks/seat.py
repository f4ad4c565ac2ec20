"""The seat of a rank consists of its place among the ranks of its worker and its connections to the other ranks. The
kernels exchange partial sums with the ranks of the same stage over these connections (kernels/cpu/row_parallel.cpp).
After each micro-batch, a rank sends hidden states to the next stage, and the ranks of the last stage send their parts
of the result to the first rank.
"""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import RankLost
from engine.ranks.messages import receive_exactly, receive_into
from engine.ranks.micro_batches import MicroBatch, how_many, split
from engine.ranks.place import Place
from engine.ranks.sender import Data, Sender
from engine.step import StepInput
from kernels.cpu.ranks import Ranks

_DONE = b"\0"
Compute = Callable[[StepInput, Tensor | None], Tensor]
"""A function that computes a micro-batch, in the first stage from its tokens, and in later stages from the hidden
states [T, h] of the previous stage. It returns hidden states [T, h] for the next stage, or, in the last stage, this
rank's part of the result.
"""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The kind of result that a step computes. Logits are divided into columns among the ranks of the last stage.
    Hidden states after the last norm are complete in each of these ranks.
    """

    has_head: bool
    vocab_size: int
    hidden_size: int
    dtype: torch.dtype
    """The compute dtype, in which stages pass on hidden states."""

    @property
    def width(self) -> int:
        """The number of columns of the result."""
        return self.vocab_size if self.has_head else self.hidden_size


class Seat:
    """A rank's place among the ranks of its worker, and its connections to the other ranks."""

    def __init__(self, place: Place, peers: Sequence[socket.socket | None]) -> None:
        """Creates the seat. `peers` contains a stream socket to each rank, and None for this rank."""
        self.place = place
        of_stage = [peers[rank] for rank in place.ranks_of(place.stage.index)]
        self.ranks = Ranks.of([-1 if peer is None else peer.fileno() for peer in of_stage], place.shard.rank)
        self._peers = peers
        self._sender = None if place.stage.is_whole else Sender()
        self._lock = threading.Lock()

    def run(self, batch: StepInput, compute: Compute, wanted: Wanted, *, alone: bool) -> Tensor:
        """Computes a step on all ranks; this rank runs `compute`. The first rank returns the result, fp32 [R, width].
        When it returns, no rank reads or writes blocks for this step any more. If `alone` is True, the step is a
        rehearsal on this rank alone. Nothing is exchanged, and the values of the result are meaningless. In other
        steps, an error is raised as RankLost, because the ranks may then be at different steps.
        """
        with self._lock:
            self.ranks.rehearses = int(alone)
            parts = split(batch, how_many(len(batch.token_ids), self.place.stage.count))
            if alone:
                return self._rehearsed(parts, compute, wanted)
            try:
                self._announce(batch, wanted.has_head)
                own = [self._pass_on(compute(part.step, self._received(part, wanted)), wanted) for part in parts]
                if self.place.rank:
                    self._send(0, _DONE)
                    return own[-1]
                return self._collected(parts, own, wanted)
            except Exception as error:
                raise RankLost(f"a step of {self.place.size} ranks failed ({error})") from error

    def _announce(self, batch: StepInput, has_head: bool) -> None:
        """Does nothing. The first rank's `Leader` overrides this method to send the step to the other ranks."""

    def _received(self, part: MicroBatch, wanted: Wanted) -> Tensor | None:
        """Receives and returns the hidden states [T, h] of the previous stage. Returns None in the first stage."""
        if self.place.stage.is_first:
            return None
        states = torch.empty((len(part.step.token_ids), wanted.hidden_size), dtype=wanted.dtype)
        receive_into(self._peer(self.place.rank - self.place.shard.size), _bytes_of(states))
        return states

    def _pass_on(self, own: Tensor, wanted: Wanted) -> Tensor:
        """Sends this rank's result of a micro-batch to the next stage or, in the last stage, to the first rank if the
        first rank needs it. Returns the result.
        """
        if not self.place.stage.is_last:
            self._send(self.place.rank + self.place.shard.size, _bytes_of(own.contiguous()))
        elif self.place.rank and self.place.rank in self._owners(wanted):
            self._send(0, bytes(_bytes_of(own.contiguous())))  # a copy: logits are valid until the next micro-batch
        return own

    def _send(self, rank: int, data: Data) -> None:
        if self._sender is None:
            self._peer(rank).sendall(data)
        else:
            self._sender.send(self._peer(rank), data)

    def _collected(self, parts: Sequence[MicroBatch], own: Sequence[Tensor], wanted: Wanted) -> Tensor:
        """Receives the parts of a step's result, and returns the result when every rank has computed the step."""
        owners = self._owners(wanted)
        result = torch.empty((sum(part.num_rows for part in parts), wanted.width))
        bounds = [wanted.width * number // len(owners) for number in range(len(owners) + 1)]  # as `Shard.span`
        for part, mine in zip(parts, own, strict=True):
            for rank, (begin, end) in zip(owners, itertools.pairwise(bounds), strict=True):
                found = self._part_of(rank, (part.num_rows, end - begin)) if rank else mine
                result[part.places, begin:end] = found
        for peer in self._peers:
            if peer is not None:
                receive_exactly(peer, len(_DONE))
        return result

    def _owners(self, wanted: Wanted) -> range:
        """Returns the ranks whose results make up the step's result. For logits, these are all ranks of the last stage;
        for hidden states, it is the first rank of the last stage.
        """
        last = self.place.ranks_of(self.place.stage.count - 1)
        return last if wanted.has_head else last[:1]

    def _part_of(self, rank: int, size: tuple[int, int]) -> Tensor:
        found = torch.empty(size)
        receive_into(self._peer(rank), _bytes_of(found))
        return found

    def _rehearsed(self, parts: Sequence[MicroBatch], compute: Compute, wanted: Wanted) -> Tensor:
        """Computes a rehearsal, and returns zeros in the shape of a real result. They are written, so that they take as
        much memory as a real result.
        """
        for part in parts:
            compute(part.step, None)
        return torch.full((sum(part.num_rows for part in parts), wanted.width), 0.0)

    def _peer(self, rank: int) -> socket.socket:
        peer = self._peers[rank]
        assert peer is not None
        return peer


def _bytes_of(tensor: Tensor) -> memoryview:
    """Returns a view of a contiguous tensor's memory."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())
