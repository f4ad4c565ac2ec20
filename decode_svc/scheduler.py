"""Decides which sequence groups run, wait, or are preempted when blocks run out. With continuous batching, a step
includes all running groups, except those that wait for blocks. Waiting groups have been claimed, so they hold blocks.
Preempted groups hold no blocks; their KV is in the host tier (`swap`). A group that arrives while a group of the same
or a higher priority is preempted starts after that group. The oldest group of the highest priority is never preempted,
and its worker's floor ensures that it can finish. So no group starves within a priority.

    add -> waiting -- admit --> running -- preempt --> preempted -- resume --> running
                  \\------------- preempt ------------/
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from common.tracing import NO_CONTEXT, TraceContext
from common.types import WorkerLoad
from decode_svc.history import History
from engine.beam_search import BeamSearch
from engine.sequence import Sequence


@dataclass(slots=True, eq=False)
class Group:
    """The samples or beams of one request on this worker. They are scheduled, preempted and resumed together."""

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
    """Sequences that have not ended; empty until the ticket has been claimed. In a beam search, these are the running
    beams, in the search's order.
    """
    search: BeamSearch | None = None
    history: History = field(default_factory=History)
    trace: TraceContext = NO_CONTEXT
    """The context of the gateway's span, which is the parent of the group's spans."""

    @property
    def rank(self) -> tuple[int, int]:
        return (self.priority, self.number)


class DecodeScheduler:
    """A scheduler with lists of running, waiting and preempted groups, each in order of (priority, arrival)."""

    def __init__(self, *, max_num_seqs: int, max_queue: int) -> None:
        self.max_num_seqs = max_num_seqs
        self._max_queue = max_queue
        self._waiting: list[Group] = []
        self._preempted: list[Group] = []
        self.running: list[Group] = []
        self._arrivals = 0

    def is_full(self, num_unclaimed: int = 0) -> bool:
        """Returns whether the queue is full. `num_unclaimed` is the number of groups whose tickets are not
        claimed yet.
        """
        queued = len(self._waiting) + len(self._preempted) + num_unclaimed
        return queued >= self._max_queue + max(0, self.max_num_seqs - self.num_running)

    def add(self, group: Group) -> None:
        """Queues a claimed group."""
        group.number = self._arrivals
        self._arrivals += 1
        insort(self._waiting, group, key=_rank)

    def admit(self, fits: Callable[[Group], bool]) -> list[Group]:
        """Starts waiting groups, in order, while a step has room and `fits` returns True, and returns them. A group
        that outranks a running group need not fit, because its first step preempts the running group.
        """
        admitted: list[Group] = []
        while self._waiting and (group := self._next()) is self._waiting[0]:
            if not self._has_room(group) or not (fits(group) or self._outranked(group)):
                break
            self._run(self._waiting, group)
            admitted.append(group)
        return admitted

    def in_the_way(self) -> Group | None:
        """Returns a running group to preempt so that the next group, of a higher priority, has room in a step. Returns
        None if there is room, or if preemption would not make enough room.
        """
        group = self._next()
        if group is None or self._has_room(group) or not (lower := self._outranked(group)):
            return None
        kept = self.num_running - sum(len(g.live) for g in lower)
        return lower[-1] if kept + len(group.live) <= self.max_num_seqs else None

    def victim(self) -> Group | None:
        """Returns the group to preempt, which is the latest waiting or running group of the lowest priority. Returns
        None if there are fewer than two such groups.
        """
        groups = [*self._waiting, *self.running]
        if len(groups) < 2:
            return None
        return max(groups, key=_rank)

    def preempt(self, group: Group) -> None:
        """Moves a running or waiting group to the preempted groups."""
        self.remove(group)
        insort(self._preempted, group, key=_rank)

    def resumable(self) -> Group | None:
        """Returns the preempted group to resume next. Returns None if there is none, if a waiting group precedes it, or
        if a step has no room for it.
        """
        if not self._preempted or (group := self._next()) is not self._preempted[0]:
            return None
        return group if self._has_room(group) else None

    def resume(self, group: Group) -> None:
        """Moves a preempted group to the running groups. The group must have its blocks again."""
        self._run(self._preempted, group)

    def latest_waiting(self) -> Group | None:
        """Returns the waiting group to preempt if nothing runs and a preempted group cannot get its blocks. Returns
        None if no group is waiting.
        """
        return self._waiting[-1] if self._waiting else None

    def remove(self, group: Group) -> None:
        """Removes a group, regardless of its state."""
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

    @property
    def lengths(self) -> tuple[int, int, int]:
        """The number of running sequences, of waiting groups and of preempted groups."""
        return self.num_running, len(self._waiting), len(self._preempted)

    def load(self) -> WorkerLoad:
        """Returns a load with the queue lengths in sequences. The other fields are not set."""
        return WorkerLoad(
            num_running=self.num_running,
            num_waiting=sum(len(g.live) for g in self._waiting),
            num_preempted=sum(len(g.live) for g in self._preempted),
        )

    # --- inside

    def _next(self) -> Group | None:
        """Returns the preempted or waiting group with the first rank, or None if there is none. This group starts next,
        so within a priority, running groups have arrived before all others. Otherwise, the last running group and an
        earlier waiting group could wait for each other's blocks.
        """
        return min([*self._preempted[:1], *self._waiting[:1]], key=_rank, default=None)

    @property
    def num_running(self) -> int:
        """Number of running sequences."""
        return sum(len(g.live) for g in self.running)

    def _has_room(self, group: Group) -> bool:
        return self.num_running + len(group.live) <= self.max_num_seqs

    def _outranked(self, group: Group) -> list[Group]:
        """Returns the running groups with a lower priority than `group`, in order."""
        return [g for g in self.running if g.priority > group.priority]

    def _run(self, queue: list[Group], group: Group) -> None:
        queue.remove(group)
        insort(self.running, group, key=_rank)


def _rank(group: Group) -> tuple[int, int]:
    return group.rank
