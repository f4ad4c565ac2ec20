"""Decides which sequence groups run, wait, or are preempted when blocks run out. Uses no torch, I/O or clock.

Continuous batching: every running group is in every step. Waiting groups have been claimed already, so they hold
blocks. Preempted groups hold no blocks on the device; their KV is in the host tier (`swap`). A group that arrives while
a group of the same or a higher priority is preempted starts after that group. The oldest group of the highest priority
is never a victim. Thanks to the floors, it can always finish. The next group is then the oldest, so no group starves
within a priority.

    add -> waiting -- admit --> running -- preempt --> preempted -- resume --> running
                  \\------------- preempt ------------/
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from common.types import WorkerLoad
from engine.beam_search import BeamSearch
from engine.sequence import Sequence


@dataclass(slots=True, eq=False)
class Group:
    """The samples of one request on this worker. They are scheduled, preempted and finished together."""

    handle: int
    attempt: int
    sequences: list[Sequence]
    priority: int = 0
    deadline_ns: int | None = None
    arrived_ns: int = 0
    claimed_ns: int = 0
    number: int = 0
    """The group's position in the order of arrival at this worker. The scheduler sets it."""
    live: list[Sequence] = field(default_factory=list)
    """Sequences that have not ended; for a beam search its running beams, in the search's order."""
    search: BeamSearch | None = None

    @property
    def rank(self) -> tuple[int, int]:
        return (self.priority, self.number)


class DecodeScheduler:
    """The lists of running, waiting and preempted groups, each in order of (priority, arrival)."""

    def __init__(self, *, max_num_seqs: int, max_queue: int) -> None:
        self.max_num_seqs = max_num_seqs
        self._max_queue = max_queue
        self._waiting: list[Group] = []
        self._preempted: list[Group] = []
        self.running: list[Group] = []
        self._arrivals = 0

    def is_full(self, num_unclaimed: int = 0) -> bool:
        """Returns whether the queue is full. `num_unclaimed` is the number of groups whose tickets are not claimed."""
        queued = len(self._waiting) + len(self._preempted) + num_unclaimed
        return queued >= self._max_queue + max(0, self.max_num_seqs - self.num_running)

    def add(self, group: Group) -> None:
        """Queues a claimed group."""
        group.number = self._arrivals
        self._arrivals += 1
        insort(self._waiting, group, key=_rank)

    def admit(self, fits: Callable[[Group], bool]) -> None:
        """Moves waiting groups to the running ones, in order, while there is room and `fits` returns True.

        A group that outranks a running group need not fit, because its first step preempts the running group.
        """
        while self._waiting and (group := self._next()) is self._waiting[0]:
            if not self._has_room(group) or not (fits(group) or self._outranked(group)):
                return
            self._run(self._waiting, group)

    def in_the_way(self) -> Group | None:
        """Returns a running group to preempt so that the next group, of a higher priority, has room in a step.

        Returns None if there is room, or if preemption would not make enough room.
        """
        group = self._next()
        if group is None or self._has_room(group) or not (lower := self._outranked(group)):
            return None
        kept = self.num_running - sum(len(g.live) for g in lower)
        return lower[-1] if kept + len(group.live) <= self.max_num_seqs else None

    def victim(self) -> Group | None:
        """Returns the group to preempt, which is the latest one of the lowest priority, or None if only the oldest is
        left.
        """
        groups = [*self._waiting, *self.running]
        if len(groups) < 2:
            return None
        return max(groups, key=_rank)

    def preempt(self, group: Group) -> None:
        """Makes a running or waiting group wait, without blocks, until it is resumed."""
        self.remove(group)
        insort(self._preempted, group, key=_rank)

    def resumable(self) -> Group | None:
        """Returns the preempted group whose turn it is, or None if there is none or a step has no room for it."""
        if not self._preempted or (group := self._next()) is not self._preempted[0]:
            return None
        return group if self._has_room(group) else None

    def resume(self, group: Group) -> None:
        """Makes a preempted group run again, after it has got its blocks back."""
        self._run(self._preempted, group)

    def latest_waiting(self) -> Group | None:
        """Returns the waiting group to preempt if nothing runs and a preempted group cannot get its blocks, or None."""
        return self._waiting[-1] if self._waiting else None

    def remove(self, group: Group) -> None:
        """Forgets a group, regardless of its state."""
        for groups in (self.running, self._waiting, self._preempted):
            if group in groups:
                groups.remove(group)

    def expired(self, now_ns: int, others: Iterable[Group] = ()) -> list[Group]:
        """Returns the groups, including `others`, whose deadline has passed."""
        return [g for g in (*self.groups(), *others) if g.deadline_ns is not None and g.deadline_ns <= now_ns]

    def groups(self) -> list[Group]:
        return [*self.running, *self._preempted, *self._waiting]

    @property
    def idle(self) -> bool:
        return not self.running and not self._waiting and not self._preempted

    def load(self) -> WorkerLoad:
        """Returns the queue lengths in sequences. The numbers of blocks are left at 0."""
        return WorkerLoad(
            num_running=self.num_running,
            num_waiting=sum(len(g.live) for g in self._waiting),
            num_preempted=sum(len(g.live) for g in self._preempted),
        )

    # --- inside

    def _next(self) -> Group | None:
        """Returns the preempted or waiting group to start next, by rank alone, or None if there is none.

        Within a priority, running groups are therefore earlier than all others. Otherwise the last running group could
        wait for the blocks of an earlier waiting group, and that group for the running group's blocks.
        """
        return min([*self._preempted[:1], *self._waiting[:1]], key=_rank, default=None)

    @property
    def num_running(self) -> int:
        """Number of running sequences."""
        return sum(len(g.live) for g in self.running)

    def _has_room(self, group: Group) -> bool:
        return self.num_running + len(group.live) <= self.max_num_seqs

    def _outranked(self, group: Group) -> list[Group]:
        """Returns the running groups of a lower priority than `group`'s, in order."""
        return [g for g in self.running if g.priority > group.priority]

    def _run(self, queue: list[Group], group: Group) -> None:
        queue.remove(group)
        insort(self.running, group, key=_rank)


def _rank(group: Group) -> tuple[int, int]:
    return group.rank
