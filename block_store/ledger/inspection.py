"""Reads the ledger's counts, holders and map of blocks, for the RPC `Inspect` and for checks of the invariants."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import chain
from typing import Any, cast

import numpy as np
import redis

from block_store.errors import LedgerUnavailable
from block_store.ledger.block_record import RECORD, RECORDS
from block_store.ledger.replies import reading
from block_store.ledger.scripts import LedgerScripts
from common.types import BlockRef, Epoch

_PIECE = 512
"""Number of entries to read with one command. HSCAN may return more."""
_TRIES = 3
_HOPELESS_S = 0.5
"""Duration in seconds above which a reading is not repeated, because a busy ledger does not stay unchanged for so
long.
"""


class BlockState(IntEnum):
    """State of a block in the ledger, numbered as in the scripts and in `BlockStoreService`."""

    FREE = 1
    RESERVED = 2
    """Allocated but not sealed. The holder may be writing to the block."""
    SEALED = 3
    CACHED = 4
    QUARANTINE = 5


@dataclass(frozen=True, slots=True)
class Counts:
    """The number of blocks in each state, and the total."""

    free: int
    reserved: int
    sealed: int
    cached: int
    quarantine: int
    total: int


@dataclass(frozen=True, slots=True)
class HolderView:
    """A record of a live holder. `own` maps each of the holder's references to a number that grows in the order in
    which the holder obtained the references. `own` is empty if the map of blocks was not read.
    """

    epoch: Epoch
    kind: str
    """"worker" or "ticket"; empty for a lease without a holder, which is damage."""
    name: str
    floor: int
    writer_slot: int
    lease_ms: int
    """Milliseconds left on the lease; negative if it has ended."""
    num_references: int
    own: dict[BlockRef, int]


@dataclass(frozen=True, slots=True)
class BlockView:
    """A record of a block, with the holders that the ledger lists for the block."""

    state: BlockState
    generation: int
    writer_slot: int
    writer_epoch: int
    prefix_hash: bytes | None
    owner: int
    """Number of the tenant against whose quota the block counts while it is CACHED; 0 if there is none."""
    holders: tuple[Epoch, ...]


@dataclass(frozen=True, slots=True)
class Inspection:
    """A snapshot of the ledger. The fields after `holders` are empty or None unless the map of blocks was read."""

    counts: Counts
    holders: tuple[HolderView, ...]
    blocks: tuple[BlockView, ...] = ()
    index: dict[bytes, int] | None = None
    free: tuple[int, ...] = ()
    cached: tuple[int, ...] = ()
    """CACHED blocks, coldest first."""
    quotas: dict[int, int] | None = None
    """Number of blocks that may be CACHED, by owner."""
    owned: dict[int, tuple[int, ...]] | None = None
    """The `cached` blocks that count against each owner's quota."""
    quarantine: tuple[tuple[int, int], ...] = ()
    """(block, writer slot) of each quarantined block."""
    floors: dict[Epoch, int] | None = None
    dying: dict[Epoch, tuple[int, ...]] | None = None
    """Blocks of ended holders that have yet to be released."""


def inspect(ledger: LedgerScripts, with_blocks: bool = False) -> Inspection:
    """Reads the ledger, with the map of blocks if `with_blocks` is True. The map grows with the arena and is read in
    parts, so that other calls do not wait long.

    If the ledger changes while the map is read, the reading is repeated a few times, unless it takes long. The last
    reading may mix several moments. Raises LedgerUnavailable if Redis does not answer, StaleDataset if the ledger has
    been or will be rebuilt, and LedgerDamaged if its data cannot be read.
    """
    if not with_blocks:
        return _counts_and_holders(ledger)
    for _ in range(_TRIES):
        began, before = time.monotonic(), ledger.clock()
        found = _with_blocks(ledger, BlockMap(ledger.client, ledger.tag))
        if ledger.clock() == before or time.monotonic() - began > _HOPELESS_S:
            break
    return found


def _counts_and_holders(ledger: LedgerScripts) -> Inspection:
    now, counts, holders = ledger.inspect_raw()
    with reading("inspect"):
        return Inspection(Counts(*counts), tuple(_holder(fields, int(now)) for fields in holders))


def _with_blocks(ledger: LedgerScripts, blocks: BlockMap) -> Inspection:
    seen = _counts_and_holders(ledger)
    with _available():
        return _whole(seen, blocks)


@contextmanager
def _available() -> Iterator[None]:
    """Returns a context for reads from Redis. It turns a missing answer into LedgerUnavailable, and an error reply or
    unreadable data into LedgerDamaged.
    """
    try:
        with reading("inspect"):
            yield
    except (redis.ConnectionError, redis.TimeoutError) as error:
        raise LedgerUnavailable(f"inspect: {error}") from error


def _whole(seen: Inspection, blocks: BlockMap) -> Inspection:
    """Returns `seen`, completed with the blocks of the map. Raises ValueError, IndexError or struct.error if the map is
    damaged.
    """
    sides = {int(block): _epochs(side) for block, side in blocks.entries("refs")}
    views = tuple(_block(fields, sides.get(i, ())) for i, fields in enumerate(blocks.records()))

    def numbers(listed: Iterable[bytes]) -> tuple[int, ...]:
        found = tuple(map(int, listed))
        if found and not 0 <= min(found) <= max(found) < len(views):
            raise ValueError("a block beyond the arena")
        return found

    def ordered(name: str) -> tuple[int, ...]:
        return numbers(block for block, _ in blocks.ordered(name))

    owns = blocks.each_ordered([f"own:{h.epoch}" for h in seen.holders])
    quotas = {int(owner): int(most) for owner, most in blocks.entries("quotas")}
    index = dict(blocks.entries("index"))
    waiting = list(blocks.ordered("quarantine"))
    return replace(
        seen,
        holders=tuple(replace(h, own=_own(found, views)) for h, found in zip(seen.holders, owns, strict=True)),
        blocks=views,
        index=dict(zip(index, numbers(index.values()), strict=True)),
        free=numbers(blocks.listed("free")),
        cached=ordered("cached"),
        quotas=quotas,
        owned={owner: ordered(f"cached:{owner}") for owner in quotas},
        quarantine=tuple(zip(numbers(block for block, _ in waiting), (int(slot) for _, slot in waiting), strict=True)),
        floors={Epoch(int(epoch)): int(floor) for epoch, floor in blocks.entries("floors")},
        dying={Epoch(int(epoch)): ordered(f"dying:{int(epoch)}") for epoch, _ in blocks.ordered("dying")},
    )


def block_states(ledger: LedgerScripts) -> bytes:
    """Returns one byte per block, the value of its `BlockState`. The ledger can change while it is read."""
    with _available():
        parts = BlockMap(ledger.client, ledger.tag).packed()
        return b"".join(np.frombuffer(part, RECORDS)["state"].tobytes() for part in parts)


def some_blocks(ledger: LedgerScripts, numbers: Sequence[int]) -> list[BlockView]:
    """Returns the records of the blocks with these numbers, which must be below the arena's number of blocks."""
    with _available():
        return BlockMap(ledger.client, ledger.tag).some(numbers)


class BlockMap:
    """A reader of a ledger's keys (`lua/lib/state.lua`), with commands of bounded duration. The methods can raise
    redis' errors.
    """

    def __init__(self, client: redis.Redis, tag: str) -> None:
        self._client = client
        self._tag = tag

    def packed(self) -> Iterator[bytes]:
        """Yields the records of all blocks, packed, in parts."""
        size = RECORD.size * _PIECE
        for first in range(0, int(self._client.strlen(self._tag + "blocks")), size):  # type: ignore[arg-type]
            yield cast(bytes, self._client.getrange(self._tag + "blocks", first, first + size - 1))

    def records(self) -> Iterator[tuple[Any, ...]]:
        """Yields the fields of every block's record."""
        for part in self.packed():
            yield from RECORD.iter_unpack(part)

    def some(self, numbers: Sequence[int]) -> list[BlockView]:
        """Returns the records of the blocks with these numbers, with their holders."""
        pipe = self._client.pipeline(transaction=False)
        for number in numbers:
            pipe.getrange(self._tag + "blocks", number * RECORD.size, (number + 1) * RECORD.size - 1)
            pipe.hget(self._tag + "refs", str(number))
        found = pipe.execute()
        return [
            _block(RECORD.unpack(packed), _epochs(side or b""))
            for packed, side in zip(found[::2], found[1::2], strict=True)
        ]

    def entries(self, name: str) -> Iterator[tuple[bytes, bytes]]:
        """Returns the entries of the Redis hash `name`, in no particular order."""
        return iter(dict(self._client.hscan_iter(self._tag + name, count=_PIECE)).items())

    def listed(self, name: str) -> Iterator[bytes]:
        """Yields the entries of the Redis list `name`."""
        first = 0
        while part := cast(list[bytes], self._client.lrange(self._tag + name, first, first + _PIECE - 1)):
            yield from part
            first += _PIECE

    def each_ordered(self, names: Sequence[str]) -> Iterator[Iterator[tuple[bytes, float]]]:
        """Yields the result of `ordered` for each of these sorted sets. The first entries of all sets are read in one
        round trip, because there may be many tickets, and most of them have few blocks.
        """
        pipe = self._client.pipeline(transaction=False)
        for name in names:
            pipe.zrange(self._tag + name, 0, _PIECE - 1, withscores=True)
        for name, part in zip(names, pipe.execute(), strict=True):
            yield chain(part, self.ordered(name, _PIECE) if len(part) == _PIECE else ())

    def ordered(self, name: str, first: int = 0) -> Iterator[tuple[bytes, float]]:
        """Yields the entries of the sorted set `name` with their scores, lowest first, starting at position `first`."""
        while part := cast(
            list[tuple[bytes, float]], self._client.zrange(self._tag + name, first, first + _PIECE - 1, withscores=True)
        ):
            yield from part
            first += _PIECE


def _own(found: Iterator[tuple[bytes, float]], views: Sequence[BlockView]) -> dict[BlockRef, int]:
    return {BlockRef(int(block), views[int(block)].generation): int(order) for block, order in found}


def _epochs(side: bytes) -> tuple[Epoch, ...]:
    return tuple(Epoch(epoch) for (epoch,) in struct.iter_unpack("<Q", side))


def _holder(fields: Sequence[Any], now_ms: int) -> HolderView:
    epoch, kind, name, floor, slot, deadline, num_references = fields
    lease_ms = int(float(deadline)) - now_ms
    return HolderView(
        Epoch(int(epoch)), (kind or b"").decode(), (name or b"").decode(), int(floor), int(slot), lease_ms,
        num_references, {},
    )  # fmt: skip


def _block(fields: tuple[Any, ...], holders: tuple[Epoch, ...]) -> BlockView:
    state, hashed, owner, slot, generation, writer, prefix_hash = fields
    return BlockView(BlockState(state), generation, slot, writer, prefix_hash if hashed else None, owner, holders)
