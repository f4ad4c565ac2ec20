"""Decides how a group is preempted and when a swapped group is resumed. Counts and times both operations."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Protocol

from block_store.errors import LedgerUnavailable
from common.telemetry import Fallbacks
from decode_svc.costs import Costs
from decode_svc.outputs import Rejection
from decode_svc.scheduler import DecodeScheduler, Group

logger = logging.getLogger("decode")
Choice = Literal["auto", "swap", "give-back"]
RESUME_PAUSE_S = 0.02
"""Minimum time in seconds between two attempts to resume a group while others run. An attempt makes several ledger
calls.
"""


class HostTier(Protocol):
    """The interface of the memory for swapped blocks (`decode_svc.swap.SwapSpace`)."""

    block_bytes: int
    num_groups: int
    """Number of KV groups."""
    num_blocks: int

    @property
    def num_free(self) -> int: ...

    def need(self, group: Group) -> int: ...

    def has_room(self, num_blocks: int) -> bool: ...

    def swap_out(self, group: Group) -> bool: ...

    def swap_in(self, group: Group, spare: int) -> int | None: ...

    def drop(self, group: Group) -> None: ...


@dataclass(slots=True)
class PreemptionCounts:
    """The counts and times of preemptions since the worker started."""

    swapped_groups: int = 0
    swapped_blocks: int = 0
    """Number of blocks that were copied out."""
    resumed_groups: int = 0
    resumed_blocks: int = 0
    """Number of blocks that were copied back. The groups' other blocks were still cached in the arena."""
    out_s: float = 0.0
    in_s: float = 0.0
    """Total time of the successful attempts to resume a group."""
    waited_s: float = 0.0
    """Total time for which resumed groups were swapped out."""
    given_back_groups: int = 0
    lost_groups: int = 0
    """Number of groups that were rejected because a block was stale when they were about to be swapped out."""


class Preemption:
    """Preempts a worker's groups, by swapping them out or giving them back, and resumes swapped groups. The object is
    used in the step thread.
    """

    def __init__(
        self,
        scheduler: DecodeScheduler,
        swap: HostTier,
        choice: Choice = "auto",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._swap = swap
        self._choice = choice
        self._clock = clock
        self._since: dict[Group, float] = {}
        self._tried_at = 0.0
        self._fallbacks = Fallbacks(logger)
        self.costs = Costs()
        self.counts = PreemptionCounts()

    def __contains__(self, group: object) -> bool:
        """Returns whether a group is swapped out."""
        return group in self._since

    def preempt(self, group: Group) -> Rejection | None:
        """Preempts a group. If it is swapped out, returns None. Otherwise, returns the reason with which the caller
        must reject the group, which holds its blocks until then.
        """
        num_blocks = self._swap.need(group)
        if not self._swaps(group, num_blocks):
            self.counts.given_back_groups += 1
            logger.info("no block left: group %d, %d blocks, is given back to prefill", group.handle, num_blocks)
            return Rejection.GIVEN_BACK
        began = self._clock()
        if not self._swap.swap_out(group):
            self.counts.lost_groups += 1
            logger.warning("reader rule: group %d had blocks that were reallocated", group.handle)
            return Rejection.LOST
        self._note_out(group, num_blocks, self._clock() - began)
        group.history.swapped_out(int(began * 1e9), num_blocks)
        self._scheduler.preempt(group)
        return None

    def resume(self, make_way: Callable[[Group], object], needed: Callable[[], int]) -> None:
        """Resumes swapped groups, in order, while enough blocks are available.

        While other groups run, a group is resumed only if there are blocks for the group and for this step of the
        running groups (`needed`). In addition, each KV group must have one more block for each of the group's sequences
        and for every fourth running sequence. With fewer blocks, the group would soon preempt a different group or be
        preempted again. If nothing runs and the blocks are too few, calls `make_way` with a waiting group, which must
        be preempted. While the ledger does not answer, no group is resumed, and no group is preempted to make room.
        """
        with suppress(LedgerUnavailable):
            while (group := self._scheduler.resumable()) is not None:
                if self._resume(group, needed):
                    continue
                if self._scheduler.running or (waiting := self._scheduler.latest_waiting()) is None:
                    return
                make_way(waiting)

    def drop(self, group: Group) -> None:
        """Frees the host memory of a group that ends."""
        self._since.pop(group, None)
        self._swap.drop(group)

    # --- inside

    def _swaps(self, group: Group, num_blocks: int) -> bool:
        if self._choice == "give-back" or self._swap.num_blocks == 0:
            return False
        if not self._swap.has_room(num_blocks):
            self._fallbacks.note("give back, not swap", f"the host tier has {self._swap.num_free} blocks left")
            return False
        if group.search is not None:  # a search that is given back starts over, and loses all of its steps
            return True
        num_bytes = num_blocks * self._swap.block_bytes
        return self._choice == "swap" or self.costs.swap_pays(num_bytes, _num_tokens(group))

    def _resume(self, group: Group, needed: Callable[[], int]) -> bool:
        """Resumes the group if there are enough blocks, and returns whether the group was resumed. While other groups
        run, makes no attempt for RESUME_PAUSE_S seconds after a failure.
        """
        num_running = self._scheduler.num_running
        if num_running and self._clock() - self._tried_at < RESUME_PAUSE_S:
            return False
        margin = (num_running // 4 + len(group.live)) * self._swap.num_groups
        if self._swap_in(group, needed() + margin if num_running else 0):
            self._scheduler.resume(group)
            return True
        self._tried_at = self._clock()
        return False

    def _swap_in(self, group: Group, spare: int) -> bool:
        began = self._clock()
        copied = self._swap.swap_in(group, spare)
        if copied is None:
            return False
        now = self._clock()
        waited = began - self._since.pop(group)
        self.costs.note_copy(copied * self._swap.block_bytes, now - began)
        self.counts.resumed_groups += 1
        self.counts.resumed_blocks += copied
        self.counts.in_s += now - began
        self.counts.waited_s += waited
        group.history.swapped_in(int(now * 1e9), copied)
        logger.info(
            "group %d is back: %d blocks copied in %.2f ms, waited %.3f s",
            group.handle, copied, (now - began) * 1e3, waited,
        )  # fmt: skip
        return True

    def _note_out(self, group: Group, num_blocks: int, seconds: float) -> None:
        self._since[group] = self._clock()
        self.costs.note_copy(num_blocks * self._swap.block_bytes, seconds)
        self.counts.swapped_groups += 1
        self.counts.swapped_blocks += num_blocks
        self.counts.out_s += seconds
        logger.info(
            "no block left: group %d, %d blocks, is swapped out (%.2f ms)", group.handle, num_blocks, seconds * 1e3
        )


def _num_tokens(group: Group) -> int:
    """Returns the number of positions that prefill would compute for the group if nothing were cached. The prompt
    counts once.
    """
    prompt_len = len(group.live[0].prompt_ids)
    return prompt_len + sum(sequence.num_computed - prompt_len for sequence in group.live)
