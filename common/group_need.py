"""Calculates the blocks that a sequence group may need, and whether a decode worker has room for it.

The gateway and the workers must agree on this arithmetic.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from common.kv_retention import KvRules, Retention
from common.types import Role, WorkerRecord


def blocks_of(num_tokens: int, block_size: int) -> int:
    """Returns the number of blocks needed for `num_tokens` positions."""
    return -(-num_tokens // block_size)


@dataclass(frozen=True, slots=True)
class GroupNeed:
    """The largest size that a sequence group may reach."""

    prompt_len: int
    max_tokens: int
    """Output tokens of each sequence."""
    width: int
    """Samples or beams that run at once."""

    def blocks(self, rules: KvRules) -> int:
        """Returns the largest number of blocks that the group holds at a time, over all KV groups, in prefill and in
        decode. A sequence that copies its sealed partial block in order to write to the copy has both blocks for a
        moment. In a group that returns to prefill, every sequence may have a sealed partial block.
        """
        lengths = [self.prompt_len + self.max_tokens] * self.width
        return most_held(rules, self.prompt_len, lengths) + self.width * len(rules.groups)


def most_held(rules: KvRules, prompt_len: int, lengths: Sequence[int]) -> int:
    """Returns the largest number of blocks that sequences with a common prompt hold at a time while they grow to these
    lengths, over all KV groups. Copied blocks are not counted.
    """
    return sum(_most_in(group, rules, prompt_len, lengths) for group in rules.groups)


def _most_in(group: Retention, rules: KvRules, prompt_len: int, lengths: Sequence[int]) -> int:
    """Returns `most_held` for one KV group. The prompt's full blocks are shared. Each sequence has private blocks for
    its other positions, but at most as many as one sequence holds at a time in this group. The tokens of a prefill step
    are divided among all sequences, so the blocks of these tokens are counted once. Their number may be rounded down,
    because `GroupNeed.blocks` adds a copied block for each sequence.
    """
    size = rules.block_size
    shared, ends = prompt_len // size, [blocks_of(length, size) for length in lengths]
    held = [group.most_held(length, size) for length in lengths]
    together = min(shared, max(held)) + sum(min(end - shared, most) for end, most in zip(ends, held, strict=True))
    everything = shared + sum(end - shared for end in ends)
    return min(everything, min(sum(held), together) + rules.prefill_step // size)


def floor_of(role: Role, max_model_len: int, rules: KvRules) -> int:
    """Returns the smallest floor of a worker: the number of blocks with which one sequence of full length can always
    continue. A decode worker copies the sequence's last blocks; a prefill worker does not.
    """
    if role == "decode":
        return GroupNeed(max_model_len - 1, 1, 1).blocks(rules)
    step = max(1, rules.prefill_step)
    return sum(group.most_held(max_model_len, rules.block_size, step) for group in rules.groups)


class GroupRoom(NamedTuple):
    """The limits on the size of a sequence group that a decode worker accepts."""

    max_sequences: int
    max_blocks: int
    """The worker's floor. 0 means that it is unknown, because the worker's record does not state it
    (`WorkerRecord.max_group_blocks`). An unknown floor is assumed to suffice for any group.
    """
    rules: KvRules

    @classmethod
    def of(cls, record: WorkerRecord, prefill_step: int | None = None) -> GroupRoom:
        """Returns the room of the decode worker with this record. `prefill_step` is the shortest step of the prefill
        workers, or None if it is unknown. If the decode worker has a longer step, its floor is larger than a prefill
        worker's, and a group that returns to prefill can get no more blocks than a prefill worker's floor. The result
        is then the room of a decode worker with the shorter step.
        """
        rules, room = record.kv_rules, record.max_group_blocks
        if room and prefill_step is not None and prefill_step < rules.prefill_step:
            shorter, longest = replace(rules, prefill_step=prefill_step), record.max_model_len
            room -= floor_of("decode", longest, rules) - floor_of("decode", longest, shorter)
            rules = shorter
        return cls(record.max_num_seqs, room, rules)

    def holds(self, need: GroupNeed) -> bool:
        """Returns whether the group is within `max_sequences` and, if the floor is known, within `max_blocks`."""
        return need.width <= self.max_sequences and (not self.max_blocks or need.blocks(self.rules) <= self.max_blocks)

    def max_tokens(self, prompt_len: int, width: int, wanted: int) -> int:
        """Returns how many tokens, up to `wanted`, each of `width` sequences may produce within `max_blocks`. Returns
        `wanted` if the floor is unknown.
        """

        def blocks(max_tokens: int) -> int:  # never falls as max_tokens grows
            return GroupNeed(prompt_len, max_tokens, width).blocks(self.rules)

        if not self.max_blocks or blocks(wanted) <= self.max_blocks:
            return wanted
        return bisect_right(range(1, wanted), self.max_blocks, key=blocks)
