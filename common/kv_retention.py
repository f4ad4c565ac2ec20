"""The rules by which KV groups keep the blocks of a sequence. They determine how many blocks a sequence holds at most,
and which cached prefix it can continue. Workers, the block store and gateways share these rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Retention:
    """The retention rule of one KV group, which keeps all positions, or only those that its window reads."""

    window: int | None = None
    """The number of positions that a position reads, including itself, or None for all. A recurrent state counts as a
    window of 1, because it is read from the block of the previous position.
    """

    @property
    def slides(self) -> bool:
        """Whether a sequence stops needing its early blocks as it grows."""
        return self.window is not None

    def first_needed(self, num_computed: int, block_size: int) -> int:
        """Returns the index of the first block that is read by positions from `num_computed` on, but at most the index
        of the last computed block. A sequence releases the blocks before this block. It can continue from a cached
        prefix of `num_computed` positions if this block and the later blocks are cached.
        """
        if self.window is None:
            return 0
        first = max(0, num_computed - self.window + 1) // block_size
        return min(first, max(0, -(-num_computed // block_size) - 1))

    def num_needed(self, num_computed: int, block_size: int) -> int:
        """Returns how many blocks a sequence of `num_computed` computed positions holds after it has released those
        that it no longer needs.
        """
        return -(-num_computed // block_size) - self.first_needed(num_computed, block_size)

    def most_held(self, num_tokens: int, block_size: int, step: int = 1) -> int:
        """Returns the largest number of blocks that a sequence holds at a time while it grows to `num_tokens`
        positions, of which one step computes at most `step`. A copy-on-write needs further blocks.

        During a step, a sequence holds the blocks of adjacent positions: those that the step computes, and those before
        them that it reads, at least one. n adjacent positions lie in at most 1 + ceil((n - 1) / block_size) blocks. A
        decode worker releases blocks only when it has filled one, which does not increase this number.
        """
        num_blocks = -(-num_tokens // block_size)
        if self.window is None:
            return num_blocks
        adjacent = max(self.window - 1, 1) + step
        return min(num_blocks, 1 - (1 - adjacent) // block_size)


@dataclass(frozen=True, slots=True)
class KvRules:
    """The retention rules of all KV groups of a model."""

    block_size: int
    groups: tuple[Retention, ...] = (Retention(),)
    prefill_step: int = 0
    """The most tokens of a prompt that prefill computes in one step. If it is 0, the blocks that prefill holds only for
    its steps are not counted.
    """

    def usable_length(self, present: Mapping[int, Sequence[bool]], start: int = 0) -> int:
        """Returns the length, in blocks, of the longest prefix from which the groups in `present` can continue, or 0.

        `present[group]` says for each block, from block `start` on, whether it is cached.
        """
        best, runs = 0, dict.fromkeys(present, 0)  # number of blocks without a gap, up to the current one
        for place in range(min(map(len, present.values()), default=0)):
            length = start + place + 1
            for group, marks in present.items():
                runs[group] = runs[group] + 1 if marks[place] else 0
            if all(run >= length - self.first_needed(group, length) for group, run in runs.items()):
                best = length
        return best

    def first_needed(self, group: int, num_blocks: int) -> int:
        """Returns the index of the first block of a group that a sequence of `num_blocks` full blocks needs."""
        return self.groups[group].first_needed(num_blocks * self.block_size, self.block_size)
