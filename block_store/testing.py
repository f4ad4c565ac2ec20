"""For tests: a real store (arena, Redis, ledger) in one line. `walk` does random operations on it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import redis

from block_store import invariants
from block_store.arena import Arena
from block_store.codec import SealItem
from block_store.held import HeldBlocks
from block_store.holder import Holder
from block_store.inspection import Inspection, inspect
from block_store.ledger import Lane, Ledger
from block_store.writer_slots import WriterSlot
from common.types import BlockRef, Epoch, KvLayout, KvSpec

LAYOUT = KvLayout(16, (KvSpec(num_layers=1, num_kv_heads=1, head_dim=8, dtype="bfloat16"),))


def chain(name: str, length: int) -> list[bytes]:
    """Prefix hashes of a made-up chain; chains whose names share a first letter share their first block."""
    return [hashlib.sha256(f"{name[: i + 1] if i == 0 else name}/{i}".encode()).digest() for i in range(length)]


@dataclass(slots=True)
class Caller:
    """A holder driven by hand, without beats: it keeps the running number only."""

    ledger: Ledger
    epoch: Epoch
    slot: WriterSlot
    number: int = 0

    def lane(self) -> Lane:
        self.number += 1
        return Lane(self.epoch, self.number)

    @property
    def last(self) -> Lane:
        """The lane of the last call, to repeat it."""
        return Lane(self.epoch, self.number)


class TestStore:
    """An arena and its ledger in a given Redis."""

    __test__ = False

    def __init__(self, client: redis.Redis, directory: Path, num_blocks: int = 12) -> None:
        self.client = client
        self.arena = Arena.create(directory, LAYOUT, num_blocks)
        self.ledger = Ledger.initialise(client, self.arena)

    def caller(self, floor: int = 0) -> Caller:
        slot = self.arena.acquire_writer_slot()
        return Caller(self.ledger, self.ledger.register("caller", writer_slot=slot.number, floor=floor), slot)

    def held(self, name: str = "worker", floor: int = 0, reserve: int = 0, beat_s: float | None = None) -> HeldBlocks:
        slot = self.arena.acquire_writer_slot()
        holder = Holder.register(self.ledger, name, writer_slot=slot.number, floor=floor, beat_s=beat_s)
        return HeldBlocks(holder, self.arena, slot, reserve)

    def expire(self, *epochs: Epoch) -> None:
        """Puts these leases into the past."""
        self.client.zadd(self.ledger.tag + "leases", {str(epoch): 1 for epoch in epochs})

    def moment(self) -> Inspection:
        """The ledger but for the passing of time."""
        now = inspect(self.ledger, with_blocks=True)
        return replace(now, holders=tuple(replace(holder, lease_ms=0) for holder in now.holders))

    def check(self, before: Inspection | None = None) -> None:
        assert not (found := invariants.check(self.ledger, before)), found

    def fill(self, caller: Caller, hashes: Sequence[bytes]) -> list[BlockRef]:
        """Allocates, writes and seals full blocks with these hashes."""
        refs = self.ledger.alloc(caller.lane(), len(hashes))
        self.write(caller, refs, hashes)
        return self.ledger.seal(caller.lane(), [SealItem(*pair) for pair in zip(refs, hashes, strict=True)])

    def write(self, caller: Caller, refs: Sequence[BlockRef], hashes: Sequence[bytes | None]) -> None:
        """By the writer rule; the content of a full block is a function of its hash."""
        self.arena.raise_generations(refs, caller.slot.number)
        for ref, prefix_hash in zip(refs, hashes, strict=True):
            self.arena.data[ref.block] = content(prefix_hash)
        self.arena.mark_sealed(refs, list(hashes), [self.arena.digest(ref.block) for ref in refs])

    def close(self) -> None:
        self.ledger.forget()
        self.arena.remove()


def content(prefix_hash: bytes | None) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """uint8 [block_bytes] that belongs to a hash."""
    return np.resize(np.frombuffer(prefix_hash or b"\xff" * 32, np.uint8), LAYOUT.block_bytes)
