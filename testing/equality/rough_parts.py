"""Parts of `rough.RoughWorld`: a request and where it is, and a worker's way to Redis that can be disturbed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from block_store.arena.arena import Arena
from block_store.errors import Fenced
from block_store.ledger.scripts import LedgerScripts
from prefill_svc.job import Job
from prefill_svc.worker import Done
from testing.equality.workers import Asked, Attachment
from testing.ledger.lossy_redis import LossyRedis

Role = Literal["prefill", "decode"]
BUDGET_S = 0.01
"""Of a ledger call: some repeats, then the worker goes on without."""


@dataclass(eq=False)
class Request(Asked):
    """One request, and where it is."""

    job: Job | None = None
    """At prefill."""
    arrived: Done | None = None
    """Prefilled, and not yet brought to decode."""
    handle: int | None = None
    """At decode."""
    times_sent: int = 0
    is_cancelled: bool = False
    dropped: set[int] = field(default_factory=set)
    """Samples that were cancelled."""

    @property
    def is_over(self) -> bool:
        alive = set(range(self.case.sampling.num_sequences)) - self.dropped
        ended = {index for index, text in self.texts.items() if text.finish_reason is not None}
        return self.is_cancelled or alive <= ended

    @property
    def branches(self) -> list[Any]:
        return [branch for branch in super().branches if branch.sample_index not in self.dropped]


class RoughAttachment(Attachment):
    """Its worker's way to Redis can be disturbed."""

    def __init__(self, arena: Arena, client: Any, name: Role, sweep: Callable[[], object], reserve: int) -> None:
        self.line = LossyRedis(client)
        self._sweep = sweep
        ledger = LedgerScripts(self.line, arena.arena_id, arena.fixed.dataset)
        super().__init__(arena, ledger, name, reserve=reserve, beat_s=None, budget_s=BUDGET_S)

    def renew(self) -> None:
        """`Attached.renew` waits until Redis answers and the ledger is there."""
        self.held.close()
        self.line.heal()
        self._sweep()
        self.held = self._register()

    def beat(self) -> None:
        """What the beat thread does."""
        if not self.is_fenced:
            try:
                self.held.holder.lease.probe()
            except Fenced:
                return
