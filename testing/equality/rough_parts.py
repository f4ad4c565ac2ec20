"""Parts of `rough.RoughWorld`, such as its requests, and attachments whose connection to Redis can be disturbed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from block_store.arena.arena import Arena
from block_store.errors import Fenced
from block_store.ledger.scripts import LedgerScripts
from prefill_svc.events import Done
from prefill_svc.job import Job
from testing.equality.workers import Asked, Attachment
from testing.ledger.lossy_redis import LossyRedis

Role = Literal["prefill", "decode"]
BUDGET_S = 0.01
"""The time budget of a ledger call, in seconds."""


@dataclass(eq=False)
class Request(Asked):
    """A request, its output and its phase."""

    job: Job | None = None
    """The job while the request is at prefill; None otherwise."""
    arrived: Done | None = None
    """The output of prefill, if it has not been sent to decode yet."""
    handle: int | None = None
    """The handle while the request is at decode; None otherwise."""
    times_sent: int = 0
    is_cancelled: bool = False
    dropped: set[int] = field(default_factory=set)
    """The samples that have been cancelled."""

    @property
    def is_over(self) -> bool:
        alive = set(range(self.case.sampling.num_sequences)) - self.dropped
        ended = {index for index, text in self.texts.items() if text.finish_reason is not None}
        return self.is_cancelled or alive <= ended

    @property
    def branches(self) -> list[Any]:
        return [branch for branch in super().branches if branch.sample_index not in self.dropped]


class RoughAttachment(Attachment):
    """An attachment to the block store whose connection to Redis can be disturbed."""

    def __init__(self, arena: Arena, client: Any, name: Role, sweep: Callable[[], object], reserve: int) -> None:
        self.line = LossyRedis(client)
        self._sweep = sweep
        ledger = LedgerScripts(self.line, arena.arena_id, arena.fixed.dataset)
        super().__init__(arena, ledger, name, reserve=reserve, beat_s=None, budget_s=BUDGET_S)

    def renew(self) -> None:
        """Gives up all blocks and registers again, like `Attached.renew`. Instead of waiting for Redis and the ledger,
        ends the disturbance and sweeps.
        """
        self.held.close()
        self.line.heal()
        self._sweep()
        self.held = self._register()

    def beat(self) -> None:
        """Sends a beat, unless the worker is fenced."""
        if not self.is_fenced:
            try:
                self.held.holder.lease.probe()
            except Fenced:
                return
