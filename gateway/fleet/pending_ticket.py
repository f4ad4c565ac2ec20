"""Keeps a ticket on its way from prefill to decode, and gives it up if decode does not get it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from gateway.fleet.workers import Workers
from protos.v1 import block_store_pb2, prefill_pb2
from protos.v1 import types_pb2 as types_pb


@dataclass(slots=True)
class PendingTicket:
    """A context manager that gives up its ticket at the end of the `with` block, unless decode has taken the ticket."""

    workers: Workers
    ticket: types_pb.Ticket | None
    """The ticket, or None if there is none or decode has it."""

    @classmethod
    def of(cls, workers: Workers, done: prefill_pb2.PrefillDone) -> Self:
        return cls(workers, done.ticket if done.HasField("ticket") else None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.ticket is not None:
            self.workers.give_up(self.ticket)

    async def move(
        self, arena_id: str, quota: types_pb.CacheQuota | None, public_tokens: int, timeout_s: float
    ) -> block_store_pb2.PullResponse:
        """Copies the ticket's blocks into another arena, and replaces the ticket with the ticket of the copies. Raises
        the errors of `Stores.pull`.
        """
        assert self.ticket is not None
        request = block_store_pb2.PullRequest(ticket=self.ticket, cache_quota=quota, public_tokens=public_tokens)
        pulled = await self.workers.stores.pull(request, arena_id, timeout_s)
        self.workers.give_up(self.ticket)
        self.ticket = pulled.ticket
        return pulled


def tokens_of(ticket: types_pb.Ticket, block_size: int) -> int:
    """Returns the number of token positions in a ticket. Positions in blocks that branches share count once."""
    total, seen = 0, set[tuple[int, int]]()
    for branch in ticket.branches:
        own = max(0, branch.num_tokens - branch.shared_blocks * block_size)
        table = max(branch.groups, key=lambda table: len(table.blocks), default=types_pb.BlockTable())
        refs = set(zip(table.blocks, table.generations, strict=True))
        total += max(0, own - len(refs & seen) * block_size)  # branches other than the first can also share blocks
        seen |= refs
    return total
