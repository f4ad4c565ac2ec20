"""The host tier, which holds copies of the blocks of preempted groups in private memory. A swapped group has no blocks
in the arena. When the group is resumed, blocks that are still cached under their hashes are acquired, and only the
others are copied back. The group's sequences then share blocks as before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import takewhile
from typing import NamedTuple

import torch

from block_store.errors import Exhausted, LedgerUnavailable
from block_store.holder.attach import Attached
from block_store.ledger.codec import SealItem
from block_store.ledger.prefix_hash import group_hash, next_hash
from common.errors import StartupError
from common.group_need import blocks_of
from common.types import BlockRef
from decode_svc.scheduler import Group
from engine.block_table import BlockTable
from engine.model_runner import ModelRunner
from engine.sequence import Sequence
from kernels.copy_blocks import copy_blocks


class SwappedTable(NamedTuple):
    """The host blocks with the KV of one sequence in one KV group."""

    first: int
    """Number of leading blocks that have left the window. They are not in `slots`."""
    slots: list[int]
    """Host blocks, in token order."""


Tables = dict[Sequence, list[SwappedTable]]
"""For each sequence, one table per KV group."""


class SwapSpace:
    """A pool of blocks in host memory, with as many blocks as fit into `max_bytes`, but not more than the arena has. It
    is used in the step thread.
    """

    def __init__(self, runner: ModelRunner, attached: Attached, max_bytes: int) -> None:
        """Allocates the pool. The runner must be bound to the attached arena. Raises StartupError if the memory is not
        available.
        """
        self._runner = runner
        self._attached = attached
        self.block_size = runner.layout.block_size
        self.num_groups = len(runner.layout.groups)
        num_arena, self.block_bytes = runner.bound_arena.shape
        self.num_blocks = min(max_bytes // self.block_bytes, num_arena)
        self._host = _host_memory(runner, self.num_blocks, self.block_bytes)
        self._free = list(range(self.num_blocks))[::-1]
        self._swapped: dict[Group, Tables] = {}

    def __contains__(self, group: object) -> bool:
        return group in self._swapped

    @property
    def num_free(self) -> int:
        return len(self._free)

    def need(self, group: Group) -> int:
        """Returns the number of host blocks for the group's KV. Blocks that its sequences share count once."""
        return len(self._distinct(group.live))

    def has_room(self, num_blocks: int) -> bool:
        return num_blocks <= len(self._free)

    def swap_out(self, group: Group) -> bool:
        """Copies a group's blocks to host memory, which must have room for them, and releases them in the arena. If a
        block is stale (reader rule), returns False and changes nothing; the group is then lost.
        """
        refs = self._distinct(group.live)
        arena, num = self._attached.arena, len(refs)
        if not arena.check_refs(refs):
            return False
        slots = self._free[len(self._free) - num :][::-1]
        self._copy(self._runner.bound_arena, self._host, [ref.block for ref in refs], slots)
        if not arena.check_refs(refs):
            return False
        del self._free[len(self._free) - num :]
        slot_of = dict(zip(refs, slots, strict=True))
        self._swapped[group] = {
            s: [
                SwappedTable(table.first, [slot_of[ref] for ref in refs])
                for table, refs in zip(s.tables, self._kept(s), strict=True)
            ]
            for s in group.live
        }
        self._release_device(group)
        return True

    def swap_in(self, group: Group, spare: int) -> int | None:
        """Allocates arena blocks for a swapped group, all or none, and copies its KV back. Returns the number of copied
        blocks, or None if fewer than `spare` free blocks would be left. Raises LedgerUnavailable (nothing has changed,
        so the caller can try again) and the errors of `HeldBlocks.seal`.
        """
        tables = {s: self._swapped[group][s] for s in group.live}
        refs = self._find_cached(tables)
        missing = [slot for slot in _distinct_slots(tables) if slot not in refs]
        try:
            fresh = self._alloc(len(missing), spare)
        except (Exhausted, LedgerUnavailable) as error:
            self._attached.held.release(list(refs.values()))
            if isinstance(error, Exhausted):
                return None
            raise
        self._copy(self._host, self._runner.bound_arena, missing, [ref.block for ref in fresh])
        refs |= zip(missing, fresh, strict=True)
        self._share(tables, refs)
        refs |= self._seal(tables, dict(zip(missing, fresh, strict=True)))
        for sequence, swapped in tables.items():
            sequence.set_tables(BlockTable((refs[slot] for slot in slots), first) for first, slots in swapped)
            sequence.tail_sealed = False  # only sealed blocks can be found cached, so the tail is a copy
        self.drop(group)
        return len(missing)

    def drop(self, group: Group) -> None:
        """Frees the host memory of a swapped group. Does nothing for other groups."""
        if (tables := self._swapped.pop(group, None)) is not None:
            self._free += _distinct_slots(tables)[::-1]

    # --- inside

    def _kept(self, sequence: Sequence) -> list[list[BlockRef]]:
        """Returns, for each KV group, the blocks with the sequence's KV. If the last block's content has not been
        copied yet, returns the source of the copy instead of the last block.
        """
        end = blocks_of(sequence.num_computed, self.block_size)
        kept = [table[table.first : end] for table in sequence.tables]
        for refs, source in zip(kept, sequence.copy_from, strict=False):  # `copy_from` is empty if nothing is copied
            refs[-1] = source
        return kept

    def _distinct(self, sequences: Iterable[Sequence]) -> list[BlockRef]:
        return list(dict.fromkeys(ref for s in sequences for refs in self._kept(s) for ref in refs))

    def _release_device(self, group: Group) -> None:
        tables: list[list[BlockRef]] = []
        for sequence in group.live:
            tables.append([*sequence.live_refs(), *sequence.copy_from])
            sequence.forget_blocks()
        self._attached.held.release_many(tables)

    def _copy(self, src: torch.Tensor, dst: torch.Tensor, src_ids: list[int], dst_ids: list[int]) -> None:
        """Copies blocks, and returns when the copies are complete."""
        if src_ids:
            self._runner.device.enter()
            copy_blocks(src, dst, torch.tensor(src_ids), torch.tensor(dst_ids))
            self._runner.device.wait()

    def _find_cached(self, tables: Tables) -> dict[int, BlockRef]:
        """Returns the arena blocks that are still cached, by host block. For each table, one call finds the longest run
        of cached blocks. The run starts at the first sealed block that no earlier table contains.
        """
        found: dict[int, BlockRef] = {}
        asked: set[int] = set()
        for sequence, swapped in tables.items():
            for group, (start, slots) in enumerate(swapped):
                sealed = slots[: max(0, sequence.num_sealed - start)]
                first = next((i for i, slot in enumerate(sealed) if slot not in asked), len(sealed))
                own = list(takewhile(lambda slot: slot not in asked, sealed[first:]))
                if own:
                    sequence.extend_hashes(sequence.num_sealed, self.block_size, next_hash)
                    blocks = range(start + first, start + first + len(own))
                    hashes = [group_hash(sequence.block_hash(i), group) for i in blocks]
                    found |= zip(own, self._attached.held.acquire([hashes])[0], strict=False)
                asked.update(own)
        return found

    def _alloc(self, num_blocks: int, spare: int) -> list[BlockRef]:
        held = self._attached.held
        refs = held.alloc(num_blocks + spare)
        if refs[num_blocks:]:
            held.release(refs[num_blocks:])
        return refs[:num_blocks]

    def _share(self, tables: Tables, refs: dict[int, BlockRef]) -> None:
        """Counts one more use of each shared block for every sequence that uses it except the first, whose use has
        already been counted.
        """
        uses = Counter(slot for swapped in tables.values() for table in swapped for slot in table.slots)
        self._attached.held.share(refs[slot] for slot, times in uses.items() for _ in range(times - 1))

    def _seal(self, tables: Tables, fresh: dict[int, BlockRef]) -> dict[int, BlockRef]:
        """Seals the full blocks among those that were copied back. Returns the final block for each host block."""
        items: dict[int, SealItem] = {}
        for sequence, swapped in tables.items():
            for group, (start, slots) in enumerate(swapped):
                for i, slot in enumerate(slots[: max(0, sequence.num_sealed - start)], start):
                    if slot in fresh and slot not in items:
                        block_hash = group_hash(sequence.block_hash(i), group)
                        items[slot] = SealItem(fresh[slot], block_hash, sequence.quota_of(i))
        if not items:
            return {}
        return dict(zip(items, self._attached.held.seal(list(items.values())), strict=True))


def _distinct_slots(tables: Tables) -> list[int]:
    return list(dict.fromkeys(slot for swapped in tables.values() for table in swapped for slot in table.slots))


def _host_memory(runner: ModelRunner, num_blocks: int, block_bytes: int) -> torch.Tensor:
    """Allocates uint8 [num_blocks, block_bytes]. On a CPU, the system provides memory when it is first written. On a
    GPU, the memory is pinned, because the copy engines need pinned memory for full speed. Raises StartupError if the
    memory is not available.
    """
    on_gpu = runner.device.compute_capability is not None
    try:
        return torch.empty((num_blocks, block_bytes), dtype=torch.uint8, pin_memory=on_gpu)
    except RuntimeError as error:
        size = num_blocks * block_bytes / 2**30
        raise StartupError(f"--swap-space: {size:.2f} GiB of host memory is not available: {error}") from error
