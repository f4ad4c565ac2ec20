"""The ledger's operations (docs/design.md, Ledger), each one call of one Lua script over up to CHUNK blocks.

Stateless: the caller and its running number come with every call (`CallId`); `lane.OrderedLane` keeps them. Of the
arena's header only the id is used.
"""

from __future__ import annotations

import copy
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import redis

from block_store import errors
from block_store.ledger import codec
from block_store.ledger.codec import SealItem
from common.ticket import TicketId
from common.types import BlockRef, Epoch

if TYPE_CHECKING:  # gateways, which have no arena, start without numpy
    from block_store.arena.arena import Arena

LEASE_S = 5.0
TICKET_LEASE_S = 8.0
TICKET_SECRET_BYTES = 16
REAP_GAP_S = 3.0
CHUNK = 256
"""Most blocks of one call. A script blocks the server while it runs: none takes 5 ms, however much is held. Who has
more makes several calls (`client.LedgerClient`).
"""
RELEASE_CHUNK = 96
"""Most blocks of one release: each may evict another, where its tenant has a quota."""

LIBRARY = ("state", "room", "prefix_index", "cache", "references", "holders")
"""Files of `lua/lib`, each built on those before it."""
T = TypeVar("T")
_OPERATIONS = (
    "register", "beat", "alloc", "seal", "acquire", "hand_over", "claim", "release", "give_up", "unregister",
    "holdings", "holds", "lookup", "reap", "inspect", "assert_held", "assert_all", "distrust", "report",
    "readable",
)  # fmt: skip


class Standing(Enum):
    """What became of an asserted reference."""

    SEALED = "S"
    UNSEALED = "R"
    LOST = "L"


class CallId(NamedTuple):
    """Whose call it is, and its number in the holder's ordered lane; a repeated number gets the stored reply."""

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
    """Writer slots whose blocks are in quarantine, or that have not asserted what they hold since a rebuild."""
    more: bool
    """Ended holders still hold blocks: the next sweep lets go of more."""
    tick: int
    """The ledger's clock, for the next sweep."""


class LedgerScripts:
    """The ledger of one arena, as one process sees it. Errors of all operations: StaleDataset, LedgerUnavailable,
    LedgerDamaged.
    """

    def __init__(self, client: redis.Redis, arena_id: str, dataset: str) -> None:
        self.arena_id = arena_id
        self.dataset = dataset
        self.client = client
        self.tag = f"{{looseleaf:{arena_id}}}:"
        before = library()
        self._scripts = {name: client.register_script(before + source(name)) for name in _OPERATIONS}

    @classmethod
    def attach(cls, client: redis.Redis, arena: Arena) -> LedgerScripts:
        """The ledger that the arena's header names; `rebuild.open_ledger` makes it."""
        return cls(client, arena.arena_id, arena.fixed.dataset)

    def under(self, dataset: str) -> LedgerScripts:
        """The same arena's ledger under another dataset generation."""
        other = copy.copy(self)
        other.dataset = dataset
        return other

    def register(
        self, name: str, *, writer_slot: int, floor: int = 0, lease_s: float = LEASE_S, token: str | None = None
    ) -> Epoch:
        """A new holder. The same `token` again gives the same holder. FloorsExceedArena."""
        token = token or secrets.token_hex(8)
        return Epoch(self._ask(int, "register", name, writer_slot, floor, _ms(lease_s), token))

    def beat(self, epoch: Epoch, lease_s: float = LEASE_S, number: int = 0) -> tuple[int, str]:
        """Extends the lease; returns how many blocks the holder could still allocate, and the census under way, if any
        (`report`). Fenced.

        `number`: of its last answered call; a ledger that does not know it is an older one: StaleDataset for everybody.
        """
        return self._ask(_unpack_beat, "beat", epoch, _ms(lease_s), number)

    def alloc(self, call: CallId, num_blocks: int, wanted: int = 0) -> list[BlockRef]:
        """`num_blocks` RESERVED blocks. `wanted`: how many this and further calls will ask for; Exhausted if there is
        no room for all. Fenced, Exhausted.
        """
        unpack = partial(codec.unpack_refs, num_refs=_bounded(num_blocks))
        return self._ask(unpack, "alloc", *call, num_blocks, max(wanted, num_blocks))

    def seal(self, call: CallId, items: Sequence[SealItem]) -> list[BlockRef]:
        """Seals all items or none; the reference to use for each: its own, or that of the block which has the hash.

        In the second case the caller holds both. What a tenant has CACHED beyond its quota is evicted, its coldest
        first, as soon as it would be cached. Fenced, Stale.
        """
        unpack = partial(codec.unpack_refs, num_refs=_bounded(len(items)))
        return self._ask(unpack, "seal", *call, *codec.pack_items(items))

    def acquire(self, call: CallId, hashes_by_group: Sequence[Sequence[bytes]]) -> list[list[BlockRef]]:
        """References on the longest prefix that is there for every group; equally long lists, one per group. Fenced."""
        _bounded(sum(map(len, hashes_by_group)))
        unpack = partial(codec.unpack_prefix, num_groups=len(hashes_by_group))
        return self._ask(unpack, "acquire", *call, codec.pack_hashes(hashes_by_group))

    def hand_over(
        self, call: CallId, refs: Sequence[BlockRef], lease_s: float = TICKET_LEASE_S, ticket: TicketId | None = None
    ) -> TicketId:
        """References of a ticket on `refs`, which the holder keeps too. `ticket`: the one that these are added to;
        None: a new one. Fenced, Stale, NotHolder, Gone.
        """
        _bounded(len(refs))
        # A repeated call is answered with the secret of the first.
        ticket = ticket or TicketId(Epoch(0), secrets.token_bytes(TICKET_SECRET_BYTES))
        packed = codec.pack_refs(refs)
        return self._ask(_unpack_ticket, "hand_over", *call, packed, _ms(lease_s), ticket.epoch, ticket.secret)

    def claim(self, call: CallId, ticket: TicketId) -> tuple[list[BlockRef], bool]:
        """Some of the ticket's references become the holder's, once, in the order of `hand_over`; and whether some are
        left for another call. Fenced, Gone.
        """
        return self._ask(_unpack_claimed, "claim", *call, ticket.epoch, ticket.secret, CHUNK)

    def give_up(self, ticket: TicketId) -> None:
        """Ends a ticket, or what is left of it, that nobody will claim. Refuses nothing."""
        self._call("give_up", ticket.epoch, ticket.secret)

    def check_readable(self, ticket: TicketId, refs: Sequence[BlockRef]) -> None:
        """Gone: there is no such ticket, or this is not its secret. NotHolder: it does not hold one of `refs`."""
        _bounded(len(refs))
        self._call("readable", ticket.epoch, ticket.secret, codec.pack_refs(refs))

    def release(self, call: CallId, refs: Sequence[BlockRef]) -> int:
        """Gives up `refs` (a chain, head first); returns how many were held. Refuses nothing."""
        _bounded(len(refs), RELEASE_CHUNK)
        return self._ask(int, "release", *call, codec.pack_refs(refs))

    def assert_held(self, call: CallId, refs: Sequence[BlockRef]) -> list[Standing]:
        """After a rebuild and `register`: references on some of what the holder says it holds, as far as they are
        still free or cached. Fenced.
        """
        _bounded(len(refs))
        return self._ask(_unpack_standings, "assert_held", *call, codec.pack_refs(refs))

    def assert_all(self, call: CallId) -> bool:
        """That was all: what else waited for the holder's writer slot becomes FREE. Returns whether some is left for
        another call. Fenced.
        """
        return self._call("assert_all", *call) == b"1"

    def ask_all(self, census: str) -> None:
        """Asks every worker, with its next beat, for a `report` under this name. LedgerUnavailable."""
        try:
            self.client.set(self.tag + "census", census, ex=10)
        except (redis.ConnectionError, redis.TimeoutError) as error:
            raise errors.LedgerUnavailable(f"census: {error}") from error

    def report(self, epoch: Epoch, census: str, missing: Sequence[BlockRef], surplus: Sequence[BlockRef]) -> None:
        """What the holder has found to differ: what the ledger lacks, what the holder knows nothing of. Fenced."""
        self._call("report", epoch, census, codec.pack_report(missing[:CHUNK], surplus[:CHUNK]))

    def reports(self, census: str) -> dict[Epoch, tuple[list[BlockRef], list[BlockRef]]]:
        """By holder that has reported: what the ledger lacks, what the holder knows nothing of. LedgerUnavailable."""
        try:
            found: dict[bytes, bytes] = self.client.hgetall(f"{self.tag}census:{census}")  # type: ignore[assignment]
        except (redis.ConnectionError, redis.TimeoutError) as error:
            raise errors.LedgerUnavailable(f"census: {error}") from error
        except redis.ResponseError as error:
            raise errors.LedgerDamaged(f"census: {error}") from error
        with reading("census"):
            return {Epoch(int(epoch)): codec.unpack_report(packed) for epoch, packed in found.items()}

    def distrust(self, epoch: Epoch | None = None) -> None:
        """Asks for a rebuild: the header knows better than the ledger. Every call from now on is a StaleDataset.

        `epoch` is the holder that saw it on blocks which the ledger gave it. Fenced: they may have changed hands since.
        """
        self._call("distrust", epoch or 0)

    def unregister(self, epoch: Epoch) -> None:
        """Releases everything and ends the holder. Refuses nothing."""
        self._call("unregister", epoch)

    def holdings(self, epoch: Epoch) -> list[BlockRef]:
        """What the holder holds, oldest reference first, read piece by piece. Fenced."""
        held: list[BlockRef] = []
        part, place = self.holdings_after(epoch, 0)
        while part:
            held += part
            part, place = self.holdings_after(epoch, place)
        return held

    def holdings_after(self, epoch: Epoch, place: int) -> tuple[list[BlockRef], int]:
        """Up to CHUNK of the holder's references, in the order in which they came, and the place of the last; those
        after it come with the next call. Place 0: from the first on; none: that was all. Fenced.
        """
        return self._ask(_unpack_holdings, "holdings", epoch, place, CHUNK)

    def holds(self, epoch: Epoch, refs: Sequence[BlockRef]) -> list[bool]:
        """Which of these references the holder holds. Fenced."""
        _bounded(len(refs))
        return [letter == ord("1") for letter in self._call("holds", epoch, codec.pack_refs(refs))]

    def lookup(self, hashes_by_group: Sequence[Sequence[bytes]]) -> int:
        """Length in blocks of the longest prefix that is indexed for every group. Takes no references."""
        length = 0
        for part in parts_of(hashes_by_group):
            found = self._ask(int, "lookup", codec.pack_hashes(part))
            length += found
            if found < max(map(len, part)):
                break
        return length

    def reap(
        self, free_slots: Iterable[int] = (), *, lease_s: float = LEASE_S, gap_s: float = REAP_GAP_S, tick: int = 0
    ) -> ReapReport:
        """One sweep. `free_slots`: writer slots whose locks were found free just now; `tick`: the last report's, an
        older ledger is refused as StaleDataset. The store's business only.
        """
        slots = b"".join(struct.pack("<I", slot) for slot in free_slots)
        return self._ask(_unpack_reaped, "reap", _ms(lease_s), _ms(gap_s), slots, tick)

    def forget(self) -> None:
        """Removes the ledger's keys, for the end of the arena's life. Calls that come later are refused as
        StaleDataset. LedgerUnavailable.
        """
        try:
            self.client.delete(self.tag + "meta")
            for key in list(self.client.scan_iter(f"{self.tag}*", count=1000)):
                self.client.unlink(key)
        except (redis.ConnectionError, redis.TimeoutError) as error:
            raise errors.LedgerUnavailable(f"forget: {error}") from error

    def inspect_raw(self) -> list[Any]:
        """The reply of `inspect.lua`; `inspection` decodes it."""
        reply = self._execute("inspect")
        if isinstance(reply, bytes):
            raise _refusal(reply)
        return list(reply)

    def clock(self) -> tuple[bytes | None, ...]:
        """A number that changes with every operation except a beat. Errors: LedgerUnavailable."""
        try:
            with reading("clock"):
                return tuple(self.client.hmget(self.tag + "meta", "dataset", "tick", "epoch", "reserved", "sealed"))  # type: ignore[arg-type]
        except (redis.ConnectionError, redis.TimeoutError) as error:
            raise errors.LedgerUnavailable(f"clock: {error}") from error

    def _ask(self, unpack: Callable[[bytes], T], name: str, *args: bytes | str | int) -> T:
        reply = self._call(name, *args)
        with reading(name):
            return unpack(reply)

    def _call(self, name: str, *args: bytes | str | int) -> bytes:
        reply: bytes = self._execute(name, *args)
        if reply[:1] == b"-":
            with reading(name):
                refusal = _refusal(reply)
            raise refusal
        return reply[1:]

    def _execute(self, name: str, *args: bytes | str | int) -> Any:
        try:
            return self._scripts[name](keys=[self.tag + "meta"], args=[self.dataset, *args])
        except (redis.ConnectionError, redis.TimeoutError) as error:
            raise errors.LedgerUnavailable(f"{name}: {error}") from error
        except redis.ResponseError as error:
            raise errors.LedgerDamaged(f"{name}: {error}") from error


@contextmanager
def reading(what: str) -> Iterator[None]:
    """A reply that cannot be read counts as damage: something else has written into Redis."""
    try:
        yield
    except (ValueError, TypeError, IndexError, OverflowError, struct.error, redis.ResponseError) as error:
        raise errors.LedgerDamaged(f"{what}: what Redis has cannot be read: {error}") from error


def _unpack_beat(reply: bytes) -> tuple[int, str]:
    room, census = reply.decode().split(" ")
    return int(room), census


def _unpack_ticket(reply: bytes) -> TicketId:
    epoch, _, secret = reply.partition(b" ")
    return TicketId(Epoch(int(epoch)), secret)


def _unpack_claimed(reply: bytes) -> tuple[list[BlockRef], bool]:
    return codec.unpack_refs(reply[1:]), reply[:1] == b"1"


def _unpack_standings(reply: bytes) -> list[Standing]:
    return [Standing(letter) for letter in reply.decode()]


def _unpack_holdings(reply: bytes) -> tuple[list[BlockRef], int]:
    return codec.unpack_refs(reply[8:]), int.from_bytes(reply[:8], "little")


def _unpack_reaped(reply: bytes) -> ReapReport:
    reaped, freed, postponed, more, now, waiting = reply.decode().split(" ")
    epochs = tuple(Epoch(int(epoch)) for epoch in reaped.split(",") if epoch)
    slots = tuple(sorted(int(float(slot)) for slot in waiting.split(",") if slot))
    if slots and not 0 <= slots[0] <= slots[-1] < 1 << 32:
        raise ValueError(f"{slots} are no writer slots")
    return ReapReport(epochs, int(freed), postponed == "1", slots, more == "1", int(now))


def server_run_id(client: redis.Redis) -> str:
    """The `run_id` of the Redis server behind `client`."""
    info: dict[str, Any] = client.info("server")
    return str(info["run_id"])


def source(name: str) -> str:
    """The text of an operation's script, without the library."""
    return (Path(__file__).parent / "lua" / f"{name}.lua").read_text()


def library() -> str:
    """What stands before every script: the functions that operations share."""
    return "\n".join(source(f"lib/{part}") for part in LIBRARY)


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _bounded(num_blocks: int, most: int = CHUNK) -> int:
    if not 0 <= num_blocks <= most:
        raise ValueError(f"{num_blocks} blocks in one call, the limit is {most}")
    return num_blocks


def chunks(items: Sequence[T], size: int = CHUNK) -> Iterator[Sequence[T]]:
    """`items` in pieces of one call each."""
    for first in range(0, len(items), size):
        yield items[first : first + size]


def parts_of(hashes_by_group: Sequence[Sequence[bytes]]) -> Iterator[list[Sequence[bytes]]]:
    """The hashes of all groups in pieces of one call each, heads first, until the shortest group has ended."""
    if not hashes_by_group:
        return
    size = CHUNK // len(hashes_by_group)
    for first in range(0, min(map(len, hashes_by_group)), size):
        yield [hashes[first : first + size] for hashes in hashes_by_group]


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
            return errors.Stale(f"block {detail[0]} has another generation or state")
        case "NOT_HOLDER":
            return errors.NotHolder(f"block {detail[0]} is not held")
        case "GONE":
            return errors.Gone("the ticket was claimed or has expired")
        case "STALE_DATASET":
            return errors.StaleDataset("the ledger was built anew")
        case _:
            return errors.OutOfOrder("the call's number is below the holder's last one")
