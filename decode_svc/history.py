"""The record of a group's waits, swaps and copies on a decode worker. The worker reports them to the gateway when a
sequence of the group ends, or when it gives the group up. This module reads no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MOST_SWAPS = 16


@dataclass(slots=True)
class Swap:
    """A period in which a group was swapped out. Times are nanoseconds of `time.monotonic_ns`."""

    start_ns: int
    blocks_out: int
    end_ns: int | None = None
    """When the group was resumed, or None if it has not been."""
    blocks_in: int = 0


@dataclass(slots=True)
class History:
    """The record of the waits, swaps and copies of one group."""

    started_ns: int | None = None
    """When the group first ran or was swapped out, or None if it has only waited."""
    num_steps: int = 0
    """Number of steps in which a sequence of the group ran."""
    copied_blocks: int = 0
    """Number of blocks that were copied because sequences wrote to shared or sealed blocks."""
    swaps: list[Swap] = field(default_factory=list)
    """At most MOST_SWAPS entries, the last of which includes all later swaps."""
    left_ns: int = 0
    """When the group left the worker, or 0 if it has not."""
    rejection: str = ""
    """Why the worker gave the group up; empty if it did not."""

    def begin(self, now_ns: int) -> None:
        """Notes that the group runs or is swapped out, unless this was noted before."""
        if self.started_ns is None:
            self.started_ns = now_ns

    def swapped_out(self, now_ns: int, num_blocks: int) -> None:
        self.begin(now_ns)
        if len(self.swaps) < MOST_SWAPS:
            self.swaps.append(Swap(now_ns, num_blocks))
        else:
            self.swaps[-1].blocks_out += num_blocks
            self.swaps[-1].end_ns = None

    def swapped_in(self, now_ns: int, num_blocks: int) -> None:
        self.swaps[-1].end_ns = now_ns
        self.swaps[-1].blocks_in += num_blocks
