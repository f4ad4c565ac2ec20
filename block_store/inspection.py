"""The ledger as one reads it: counts, holders, the map of blocks. For `Inspect`, for the invariants and for people."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from block_store.ledger import Ledger
from common.types import BlockRef, Epoch

RECORD = struct.Struct("<BBHIQQ32s")
"""One block in the packed string of `lua/prelude.lua`: state, hashed, unused, writer slot, generation, writer epoch,
hash.
"""


class BlockState(IntEnum):
    """The ledger's states, numbered as in the scripts and in `BlockStoreService`."""

    FREE = 1
    RESERVED = 2
    """Allocated and not sealed: reserved or being written; only the header knows which."""
    SEALED = 3
    CACHED = 4
    QUARANTINE = 5


@dataclass(frozen=True, slots=True)
class Counts:
    """Blocks by state."""

    free: int
    reserved: int
    sealed: int
    cached: int
    quarantine: int
    total: int


@dataclass(frozen=True, slots=True)
class HolderView:
    """One live holder; `own` maps what it holds to its place in the order, and is empty without the map of blocks."""

    epoch: Epoch
    kind: str
    """"worker" or "ticket"; empty if the ledger is broken: a lease of nobody."""
    name: str
    floor: int
    writer_slot: int
    lease_ms: int
    """Time left; negative: past."""
    num_references: int
    own: dict[BlockRef, int]


@dataclass(frozen=True, slots=True)
class BlockView:
    """One block's record and block side."""

    state: BlockState
    generation: int
    writer_slot: int
    writer_epoch: int
    prefix_hash: bytes | None
    holders: tuple[Epoch, ...]


@dataclass(frozen=True, slots=True)
class Inspection:
    """One moment of the ledger."""

    counts: Counts
    holders: tuple[HolderView, ...]
    blocks: tuple[BlockView, ...] = ()
    index: dict[bytes, int] | None = None
    free: tuple[int, ...] = ()
    cached: tuple[int, ...] = ()
    """Coldest first."""
    quarantine: tuple[tuple[int, int], ...] = ()
    """(block, writer slot)"""
    floors: dict[Epoch, int] | None = None
    dying: dict[Epoch, tuple[int, ...]] | None = None
    """Blocks that ended holders are still to let go of."""


def inspect(ledger: Ledger, with_blocks: bool = False) -> Inspection:
    """Reads the ledger in one script; with the map of blocks it is as large as the arena has blocks."""
    now, counts, holders, *rest = ledger.inspect_raw(with_blocks)
    views = tuple(_holder(fields, int(now)) for fields in holders)
    if not with_blocks:
        return Inspection(Counts(*counts), views)
    records, refs, index, free, cached, quarantine, floors, dying = rest
    sides = {int(block): _epochs(side) for block, side in _pairs(refs)}
    blocks = tuple(_block(fields, sides.get(i, ())) for i, fields in enumerate(RECORD.iter_unpack(records)))
    return Inspection(
        Counts(*counts), views, blocks, {key: int(block) for key, block in _pairs(index)},
        tuple(map(int, free)), tuple(map(int, cached)),
        tuple((int(block), int(float(slot))) for block, slot in _pairs(quarantine)),
        {Epoch(int(epoch)): int(floor) for epoch, floor in _pairs(floors)},
        {Epoch(int(epoch)): tuple(map(int, left)) for epoch, left in dying},
    )  # fmt: skip


def _pairs(flat: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def _epochs(side: bytes) -> tuple[Epoch, ...]:
    return tuple(Epoch(epoch) for (epoch,) in struct.iter_unpack("<Q", side))


def _holder(fields: Sequence[Any], now_ms: int) -> HolderView:
    epoch, kind, name, floor, slot, deadline, num_references, own = fields
    held: dict[BlockRef, int] = {}
    for block, value in _pairs(own):
        generation, order = struct.unpack("<QQ", value)
        held[BlockRef(int(block), generation)] = order
    lease_ms = int(float(deadline)) - now_ms
    return HolderView(
        Epoch(int(epoch)), (kind or b"").decode(), (name or b"").decode(), int(floor), int(slot), lease_ms,
        num_references, held,
    )  # fmt: skip


def _block(fields: tuple[Any, ...], holders: tuple[Epoch, ...]) -> BlockView:
    state, hashed, _, slot, generation, writer, prefix_hash = fields
    return BlockView(BlockState(state), generation, slot, writer, prefix_hash if hashed else None, holders)
