"""Which sequence groups run, which wait, and who goes when blocks run out. Plain Python: no torch, no I/O, no clock.

Continuous batching: every running group is in every step. Waiting groups have been claimed already, so they hold
blocks. The oldest group of the highest priority is never a victim: with the floors it can always finish.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from common.types import WorkerLoad
from engine.beam import BeamSearch
from engine.sequence import Sequence


@dataclass(slots=True, eq=False)
class Group:
    """The samples of one request on this worker; scheduled, preempted and finished as one."""

    handle: int
    attempt: int
    sequences: list[Sequence]
    priority: int = 0
    deadline_ns: int | None = None
    arrived_ns: int = 0
    claimed_ns: int = 0
    number: int = 0
    """Order of arrival at this worker; set by the scheduler."""
    live: list[Sequence] = field(default_factory=list)
    """Sequences that have not ended; of a beam search its running beams, in the search's order."""
    search: BeamSearch | None = None

    @property
    def rank(self) -> tuple[int, int]:
        return (self.priority, self.number)


class DecodeScheduler:
    """Running and waiting groups, each in order of (priority, arrival)."""

    def __init__(self, *, max_num_seqs: int, max_queue: int) -> None:
        self.max_num_seqs = max_num_seqs
        self._max_queue = max_queue
        self._waiting: list[Group] = []
        self.running: list[Group] = []
        self._arrivals = 0

    def is_full(self, num_unclaimed: int = 0) -> bool:
        """Whether the queue, with groups that are still to be claimed, holds all it may."""
        return len(self._waiting) + num_unclaimed >= self._max_queue + max(0, self.max_num_seqs - self._num_running)

    def add(self, group: Group) -> None:
        """Queue a claimed group."""
        group.number = self._arrivals
        self._arrivals += 1
        insort(self._waiting, group, key=lambda g: g.rank)

    def admit(self, fits: Callable[[Group], bool]) -> None:
        """Move waiting groups to the running ones, in order, while there is room and `fits` says yes."""
        while self._waiting:
            group = self._waiting[0]
            if self._num_running + len(group.live) > self.max_num_seqs or not fits(group):
                return
            insort(self.running, self._waiting.pop(0), key=lambda g: g.rank)

    def victim(self) -> Group | None:
        """The group to preempt: of the lowest priority the latest; None if only the oldest one is left."""
        groups = [*self._waiting, *self.running]
        if len(groups) < 2:
            return None
        return max(groups, key=lambda g: g.rank)

    def remove(self, group: Group) -> None:
        """Forget a group, wherever it is."""
        for groups in (self.running, self._waiting):
            if group in groups:
                groups.remove(group)

    def expired(self, now_ns: int, others: Iterable[Group] = ()) -> list[Group]:
        """Groups, of these and `others`, whose deadline has passed."""
        return [g for g in (*self.groups(), *others) if g.deadline_ns is not None and g.deadline_ns <= now_ns]

    def groups(self) -> list[Group]:
        return [*self.running, *self._waiting]

    @property
    def _num_running(self) -> int:
        return sum(len(g.live) for g in self.running)

    @property
    def idle(self) -> bool:
        return not self.running and not self._waiting

    def load(self) -> WorkerLoad:
        waiting = sum(len(g.live) for g in self._waiting)
        return WorkerLoad(num_running=self._num_running, num_waiting=waiting)
