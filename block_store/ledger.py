"""The ledger of references: each operation of DESIGN section 5 as one call of one Lua script over a whole block table.

Stateless: who calls, and with which running number, comes with every call (`Lane`); `holder.Holder` keeps them. Knows
nothing of the arena's header but its id, nor of what the blocks contain.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import redis

from block_store import codec, errors
from block_store.arena import Arena
from block_store.codec import SealItem
from common.types import BlockRef, Epoch

LEASE_S = 5.0
TICKET_LEASE_S = 10.0
REAP_GAP_S = 3.0
MAX_BATCH = 16384
"""Blocks per call. A script blocks the server while it runs; longer sequences are refused when a worker attaches."""

_OPERATIONS = (
    "register", "beat", "alloc", "seal", "acquire", "hand_over", "claim", "release", "unregister", "holdings", "lookup",
    "reap", "inspect",
)  # fmt: skip


class Lane(NamedTuple):
    """Whose call it is, and its place in the holder's ordered lane; a repeated number gets the stored reply."""

    epoch: Epoch
    number: int


@dataclass(frozen=True, slots=True)
class ReapReport:
    """What one sweep did."""

    reaped: tuple[Epoch, ...]
    num_unquarantined: int
    postponed: bool
    """The last sweep is too long ago or in the future: every lease was renewed instead."""
    waiting_slots: tuple[int, ...]
    """Writer slots whose blocks are in quarantine."""


class Ledger:
    """The ledger of one arena, as one process sees it. Errors of all operations: StaleDataset, LedgerUnavailable."""

    def __init__(self, client: redis.Redis, arena_id: str, dataset: str) -> None:
        self.arena_id = arena_id
        self.dataset = dataset
        self.client = client
        self.tag = f"{{looseleaf:{arena_id}}}:"
        prelude = _source("prelude")
        self._scripts = {name: client.register_script(prelude + _source(name)) for name in _OPERATIONS}

    @classmethod
    def initialise(cls, client: redis.Redis, arena: Arena) -> Ledger:
        """The ledger named in the arena's header, or a new one with all blocks FREE if Redis has none.

        Errors: ArenaBusy (a new ledger, but old writers live), LedgerError (Redis holds another ledger of this arena).
        """
        fixed, meta = arena.fixed, f"{{looseleaf:{arena.arena_id}}}:meta"
        if not client.exists(meta) and (alive := arena.live_writers()):
            raise errors.ArenaBusy(f"Redis has no ledger, but writer slots {alive} are held; stop these workers first")
        run_id, dataset, rebuild = server_run_id(client), secrets.token_hex(8), fixed.rebuild_count + 1
        script = client.register_script(_source("initialise"))
        reply = _text(script(keys=[meta], args=[dataset, run_id, arena.num_blocks, rebuild, fixed.dataset]))
        if reply.startswith("-"):
            raise errors.LedgerError(f"Redis has another ledger of arena {arena.arena_id}: {reply[1:]}")
        if reply == "+KEPT":
            return cls(client, arena.arena_id, fixed.dataset)
        arena.enter_ledger(run_id, dataset, rebuild)
        return cls(client, arena.arena_id, dataset)

    @classmethod
    def attach(cls, client: redis.Redis, arena: Arena) -> Ledger:
        """The ledger that the arena's header names."""
        return cls(client, arena.arena_id, arena.fixed.dataset)

    def register(
        self, name: str, *, writer_slot: int, floor: int = 0, lease_s: float = LEASE_S, token: str | None = None
    ) -> Epoch:
        """A new holder. The same `token` again gives the same holder. FloorsExceedArena."""
        reply = self._call("register", name, writer_slot, floor, _ms(lease_s), token or secrets.token_hex(8))
        return Epoch(int(reply))

    def beat(self, epoch: Epoch, lease_s: float = LEASE_S) -> int:
        """Extends the lease; returns how many blocks the holder could still allocate. Fenced."""
        return int(self._call("beat", epoch, _ms(lease_s)))

    def alloc(self, lane: Lane, num_blocks: int) -> list[BlockRef]:
        """`num_blocks` RESERVED blocks. Fenced, Exhausted."""
        return codec.unpack_refs(self._call("alloc", *lane, _bounded(num_blocks)))

    def seal(self, lane: Lane, items: Sequence[SealItem]) -> list[BlockRef]:
        """Seals all items or none; the reference to use for each: its own, or that of the block which has the hash.

        In the second case the caller holds both. Fenced, Stale.
        """
        _bounded(len(items))
        return codec.unpack_refs(self._call("seal", *lane, codec.pack_items(items)))

    def acquire(self, lane: Lane, hashes_by_group: Sequence[Sequence[bytes]]) -> list[list[BlockRef]]:
        """References on the longest prefix that is there for every group; equally long lists, one per group. Fenced."""
        _bounded(sum(len(hashes) for hashes in hashes_by_group))
        reply = self._call("acquire", *lane, codec.pack_hashes(hashes_by_group))
        return codec.unpack_prefix(reply, len(hashes_by_group))

    def hand_over(
        self, lane: Lane, moved: Sequence[BlockRef], kept: Sequence[BlockRef] = (), lease_s: float = TICKET_LEASE_S
    ) -> Epoch:
        """A ticket with references on `moved` and `kept`; the holder loses `moved`. Fenced, Stale, NotHolder."""
        _bounded(len(moved) + len(kept))
        reply = self._call("hand_over", *lane, codec.pack_refs(moved), codec.pack_refs(kept), _ms(lease_s))
        return Epoch(int(reply))

    def claim(self, lane: Lane, ticket: Epoch) -> list[BlockRef]:
        """The ticket's references become the holder's, once, in the order of `hand_over`. Fenced, Gone."""
        return codec.unpack_refs(self._call("claim", *lane, ticket))

    def release(self, lane: Lane, refs: Sequence[BlockRef]) -> int:
        """Gives up `refs` (a chain, head first); returns how many were held. Refuses nothing."""
        _bounded(len(refs))
        return int(self._call("release", *lane, codec.pack_refs(refs)))

    def unregister(self, epoch: Epoch) -> None:
        """Releases everything and ends the holder. Refuses nothing."""
        self._call("unregister", epoch)

    def holdings(self, epoch: Epoch) -> list[BlockRef]:
        """What the holder holds, oldest reference first. Fenced."""
        return codec.unpack_refs(self._call("holdings", epoch))

    def lookup(self, hashes_by_group: Sequence[Sequence[bytes]]) -> int:
        """Length in blocks of the longest prefix that is indexed for every group. Takes no references."""
        _bounded(sum(len(hashes) for hashes in hashes_by_group))
        return int(self._call("lookup", codec.pack_hashes(hashes_by_group)))

    def reap(
        self, free_slots: Iterable[int] = (), *, lease_s: float = LEASE_S, gap_s: float = REAP_GAP_S
    ) -> ReapReport:
        """One sweep. `free_slots`: writer slots whose locks were found free just now. The store's business only."""
        slots = b"".join(struct.pack("<I", slot) for slot in free_slots)
        reaped, freed, postponed, waiting = self._call("reap", _ms(lease_s), _ms(gap_s), slots).decode().split(" ")
        epochs = tuple(Epoch(int(epoch)) for epoch in reaped.split(",") if epoch)
        return ReapReport(epochs, int(freed), postponed == "1", tuple(int(float(s)) for s in waiting.split(",") if s))

    def forget(self) -> None:
        """Removes the ledger's keys, for the end of the arena's life. Calls that come later are refused as
        StaleDataset.
        """
        self.client.delete(self.tag + "meta")
        for key in list(self.client.scan_iter(f"{self.tag}*", count=1000)):
            self.client.delete(key)

    def inspect_raw(self, with_blocks: bool) -> list[Any]:
        """The reply of `inspect.lua`; `inspection` decodes it."""
        reply = self._execute("inspect", int(with_blocks))
        if isinstance(reply, bytes):
            raise _refusal(reply)
        return list(reply)

    def _call(self, name: str, *args: bytes | str | int) -> bytes:
        reply: bytes = self._execute(name, *args)
        if reply[:1] == b"-":
            raise _refusal(reply)
        return reply[1:]

    def _execute(self, name: str, *args: bytes | str | int) -> Any:
        try:
            return self._scripts[name](keys=[self.tag + "meta"], args=[self.dataset, *args])
        except (redis.ConnectionError, redis.TimeoutError) as error:
            raise errors.LedgerUnavailable(f"{name}: {error}") from error


def server_run_id(client: redis.Redis) -> str:
    """The `run_id` of the Redis server behind `client`."""
    info: dict[str, Any] = client.info("server")
    return str(info["run_id"])


def _source(name: str) -> str:
    return (Path(__file__).parent / "lua" / f"{name}.lua").read_text()


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _text(reply: Any) -> str:
    return reply.decode() if isinstance(reply, bytes) else str(reply)


def _bounded(num_blocks: int) -> int:
    if not 0 <= num_blocks <= MAX_BATCH:
        raise ValueError(f"{num_blocks} blocks in one call, the limit is {MAX_BATCH}")
    return num_blocks


def _refusal(reply: bytes) -> errors.LedgerError:
    """The exception for a refusal: '-CODE detail..'."""
    code, *detail = reply[1:].decode().split(" ")
    match code:
        case "EXHAUSTED":
            return errors.Exhausted(int(detail[0]), int(detail[1]))
        case "FLOORS_EXCEED_ARENA":
            return errors.FloorsExceedArena(int(detail[0]), int(detail[1]))
        case "FENCED":
            return errors.Fenced("the holder was reaped")
        case "STALE":
            return errors.Stale(f"block {detail[0]} is in another life or state")
        case "NOT_HOLDER":
            return errors.NotHolder(f"block {detail[0]} is not held")
        case "GONE":
            return errors.Gone("the ticket was claimed or has expired")
        case "STALE_DATASET":
            return errors.StaleDataset("the ledger was built anew")
        case _:
            return errors.OutOfOrder("the call's number is below the holder's last one")
