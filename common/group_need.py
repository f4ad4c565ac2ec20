"""Calculates the blocks that a sequence group may need, and whether a decode worker has room for it.

The gateway and the workers must agree on this arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from common.types import WorkerRecord


def blocks_of(num_tokens: int, block_size: int) -> int:
    """Returns the number of blocks needed for `num_tokens` positions."""
    return -(-num_tokens // block_size)


@dataclass(frozen=True, slots=True)
class GroupNeed:
    """The largest sizes that a sequence group may reach."""

    prompt_len: int
    max_tokens: int
    """Output tokens of each sequence."""
    width: int
    """Samples or beams that run at once."""

    def blocks(self, block_size: int) -> int:
        """Returns the largest number of blocks that the group holds at a time in one KV group.

        The prompt's full blocks are shared. Each sequence has private blocks for its other positions. While a
        sequence's sealed partial block is copied so that it can be written to, the sequence has both the block and the
        copy. In a returning group, every sequence has such a block.
        """
        shared = self.prompt_len // block_size
        return shared + self.width * (blocks_of(self.prompt_len + self.max_tokens, block_size) - shared + 1)


class GroupRoom(NamedTuple):
    """The largest sequence group that a decode worker accepts."""

    max_sequences: int
    max_blocks: int
    """The worker's floor. 0 means that the floor is unknown and is assumed to suffice."""
    block_size: int

    @classmethod
    def of(cls, record: WorkerRecord) -> GroupRoom:
        return cls(record.max_num_seqs, record.max_group_blocks, record.block_size)

    def holds(self, need: GroupNeed) -> bool:
        """Returns whether the group fits into the worker's batch and floor."""
        return need.width <= self.max_sequences and (
            not self.max_blocks or need.blocks(self.block_size) <= self.max_blocks
        )

    def max_tokens(self, prompt_len: int, width: int) -> int:
        """Returns how many tokens each of `width` sequences may produce within max_blocks: the inverse of
        `GroupNeed.blocks`.
        """
        shared = prompt_len // self.block_size
        own = (self.max_blocks - shared) // width - 1
        return (shared + own) * self.block_size - prompt_len
