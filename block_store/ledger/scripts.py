"""The ledger's operations, most of which are one call of a Lua script (long: a method for each script).

docs/design.md, Ledger, describes the operations. This module keeps no state of a holder; `lane.OrderedLane` keeps the
epoch and the number that a `CallId` contains.
"""

from __future__ import annotations

import copy
import re
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import redis

from block_store import errors
from block_store.ledger import codec, lua_library, replies
from block_store.ledger.codec import SealItem
from block_store.ledger.replies import ReapReport, Standing
from common.ticket import TicketId
from common.types import BlockRef, Epoch

if TYPE_CHECKING:  # so that gateways, which have no arena, start without numpy
    from block_store.arena.arena import Arena

LEASE_S = 5.0
TICKET_LEASE_S = 8.0
TICKET_SECRET_BYTES = 16
REAP_GAP_S = 3.0
CHUNK = 256
"""Maximum number of blocks that one call of most operations names. It is limited because a script blocks the server
while it runs.
"""
RELEASE_CHUNK = 96
"""Maximum number of blocks per release. It is smaller than CHUNK, because each released block may cause an eviction if
its tenant has a quota.
"""

T = TypeVar("T")
_REFUSAL = re.compile(r"(^|: -)(OOM|MISCONF|BUSY|READONLY) ")
"""An error for which Redis refuses any script, or the first write of any script, before Redis 7 with the script's line
in front of it.
"""
_OPERATIONS = (
    "register", "beat", "alloc", "seal", "acquire", "hand_over", "claim", "release", "give_up", "unregister",
    "holdings", "holds", "reap", "inspect", "assert_held", "assert_all", "distrust", "report",
    "present", "keep", "deliver",
)  # fmt: skip


class CallId(NamedTuple):
    """The identity of a call: the holder's epoch, and the call's number in the holder's lane. If the last number is
    repeated, the ledger returns the stored reply.
    """

    epoch: Epoch
    number: int


class LedgerScripts:
    """A client of the ledger of one arena, without a holder's state. Every method that runs a script can raise
    StaleDataset, LedgerUnavailable and LedgerDamaged.
    """

    def __init__(self, client: redis.Redis, arena_id: str, dataset: str) -> None:
        self.arena_id = arena_id
        self.dataset = dataset
        self.client = client
        self.tag = f"{{looseleaf:{arena_id}}}:"
        scripts = {name: lua_library.with_library(lua_library.source(name)) for name in _OPERATIONS}
        self._scripts = {name: client.register_script(script) for name, script in scripts.items()}

    @classmethod
    def attach(cls, client: redis.Redis, arena: Arena) -> LedgerScripts:
        """Returns a client of the ledger that the arena's header names. Does not check that this ledger exists;
        `rebuild.open_ledger` does.
        """
        return cls(client, arena.arena_id, arena.fixed.dataset)

    def under(self, dataset: str) -> LedgerScripts:
        """Returns a client of the same arena's ledger under a different dataset generation."""
        other = copy.copy(self)
        other.dataset = dataset
        return other

    def register(
        self, name: str, *, writer_slot: int, floor: int = 0, lease_s: float = LEASE_S, token: str | None = None
    ) -> Epoch:
        """Registers a new holder, and returns its epoch. If `token` is that of a live holder, returns that holder's
        epoch instead. Raises FloorsExceedArena if the floors of all holders would not fit into the arena.
        """
        token = token or secrets.token_hex(8)
        return Epoch(self._ask(int, "register", name, writer_slot, floor, _ms(lease_s), token))

    def beat(self, epoch: Epoch, lease_s: float = LEASE_S, number: int = 0) -> tuple[int, str]:
        """Extends the lease. Returns how many blocks the holder could still allocate, and the name of the current
        census (`report`), or "" if there is none. Raises Fenced if the holder has ended.

        `number` is the number of the holder's last answered call. If the ledger's last number is lower, an older
        snapshot was restored, and this and later calls raise StaleDataset.
        """
        return self._ask(replies.unpack_beat, "beat", epoch, _ms(lease_s), number)

    def alloc(self, call: CallId, num_blocks: int, wanted: int = 0) -> list[BlockRef]:
        """Allocates `num_blocks` RESERVED blocks. `wanted` is the number of blocks that this and later calls will
        allocate together. Raises Exhausted if there is no room for all of them, and Fenced if the holder has ended.
        """
        unpack = partial(codec.unpack_refs, num_refs=_bounded(num_blocks))
        return self._ask(unpack, "alloc", *call, num_blocks, max(wanted, num_blocks))

    def seal(self, call: CallId, items: Sequence[SealItem]) -> list[BlockRef]:
        """Seals all items or none. Returns, for each item, the reference to use: the given reference, or a reference to
        a block that already has the hash. In the second case, the caller holds both blocks. Raises Stale if the holder
        is not writing one of the blocks, and Fenced if the holder has ended.
        """
        unpack = partial(codec.unpack_refs, num_refs=_bounded(len(items)))
        return self._ask(unpack, "seal", *call, *codec.pack_items(items))

    def acquire(self, call: CallId, hashes_by_group: Sequence[Sequence[bytes]]) -> list[list[BlockRef]]:
        """Takes references to the longest prefix indexed for every group, and returns them in lists of equal length,
        one per group. The prefix ends before the first block that would use up another worker's floor. Raises Fenced if
        the holder has ended.
        """
        _bounded(sum(map(len, hashes_by_group)))
        unpack = partial(codec.unpack_prefix, num_groups=len(hashes_by_group))
        return self._ask(unpack, "acquire", *call, codec.pack_hashes(hashes_by_group))

    def hand_over(
        self, call: CallId, refs: Sequence[BlockRef], lease_s: float = TICKET_LEASE_S, ticket: TicketId | None = None
    ) -> TicketId:
        """Adds references to `refs` to `ticket`, or to a new ticket if it is None. The holder keeps its own references.

        Raises Stale if a block is not sealed or has a different generation, NotHolder if the holder does not have one
        of the blocks, Gone if `ticket` has ended or its secret is wrong, and Fenced if the holder has ended.
        """
        _bounded(len(refs))
        # A repeated call gets the secret of the first call as its answer.
        ticket = ticket or TicketId(Epoch(0), secrets.token_bytes(TICKET_SECRET_BYTES))
        packed = codec.pack_refs(refs)
        return self._ask(replies.unpack_ticket, "hand_over", *call, packed, _ms(lease_s), ticket.epoch, ticket.secret)

    def deliver(
        self, call: CallId, items: Sequence[SealItem], ticket: TicketId | None = None, lease_s: float = TICKET_LEASE_S
    ) -> tuple[TicketId, list[BlockRef]]:
        """Seals all items or none, and moves the blocks to `ticket`, or to a new ticket if it is None, as `seal`,
        `hand_over` and `release` would. Returns the ticket and, for each item, the reference that the ticket holds: the
        given reference, or a reference to a block that already has the hash. Raises Stale if the holder is not writing
        one of the blocks, Gone if `ticket` has ended or its secret is wrong, and Fenced if the holder has ended.
        """
        _bounded(len(items))
        ticket = ticket or TicketId(Epoch(0), secrets.token_bytes(TICKET_SECRET_BYTES))
        unpack = partial(replies.unpack_delivered, num_refs=len(items), secret_bytes=len(ticket.secret))
        packed = codec.pack_items(items)
        return self._ask(unpack, "deliver", *call, *packed, _ms(lease_s), ticket.epoch, ticket.secret)

    def claim(self, call: CallId, ticket: TicketId) -> tuple[list[BlockRef], bool]:
        """Moves up to CHUNK of the ticket's references to the holder, in the order in which the ticket got them.
        Returns these references, and whether the ticket has more references for a further call. Raises Gone if the
        ticket has ended, if its secret is wrong, or if another holder has begun to claim it, and Fenced if the holder
        has ended.
        """
        return self._ask(replies.unpack_claimed, "claim", *call, ticket.epoch, ticket.secret, CHUNK)

    def give_up(self, ticket: TicketId) -> None:
        """Ends a ticket that no worker will claim, or the unclaimed part of a ticket. Does nothing if the ticket has
        already ended or the secret is wrong.
        """
        self._call("give_up", ticket.epoch, ticket.secret)

    def keep(self, ticket: TicketId, refs: Sequence[BlockRef] = (), lease_s: float = TICKET_LEASE_S) -> None:
        """Extends the lease of a ticket that holds `refs`. Raises Gone if there is no such ticket or the secret is
        wrong, and NotHolder if the ticket lacks one of `refs`.
        """
        _bounded(len(refs))
        self._call("keep", ticket.epoch, ticket.secret, _ms(lease_s), codec.pack_refs(refs))

    def release(self, call: CallId, refs: Sequence[BlockRef]) -> int:
        """Releases `refs` (a chain, head first). Ignores references that the holder does not have. Returns how many
        references were released, which is 0 if the holder is fenced.
        """
        _bounded(len(refs), RELEASE_CHUNK)
        return self._ask(int, "release", *call, codec.pack_refs(refs))

    def assert_held(self, call: CallId, refs: Sequence[BlockRef]) -> list[Standing]:
        """After a rebuild and `register`, gives the holder references to those of `refs` that are not lost. Returns the
        standing of each reference. Raises Fenced if the holder has ended.
        """
        _bounded(len(refs))
        return self._ask(replies.unpack_standings, "assert_held", *call, codec.pack_refs(refs))

    def assert_all(self, call: CallId) -> bool:
        """Declares that the holder has asserted all its blocks, and frees other blocks that wait for its writer slot.
        Returns whether more such blocks remain for a further call. Raises Fenced if the holder has ended.
        """
        return self._call("assert_all", *call) == b"1"

    def ask_all(self, census: str) -> None:
        """Asks every worker to call `report`, with the name `census`, after its next beat. Raises LedgerUnavailable if
        Redis does not answer.
        """
        try:
            self.client.set(self.tag + "census", census, ex=10)
        except (redis.ConnectionError, redis.TimeoutError) as error:
            raise errors.LedgerUnavailable(f"census: {error}") from error

    def report(self, epoch: Epoch, census: str, missing: Sequence[BlockRef], surplus: Sequence[BlockRef]) -> None:
        """Stores the differences between the ledger and the holder's record: at most CHUNK references that the ledger
        lacks, and at most CHUNK references that are unknown to the holder. Raises Fenced if the holder has ended.
        """
        self._call("report", epoch, census, codec.pack_report(missing[:CHUNK], surplus[:CHUNK]))

    def reports(self, census: str) -> dict[Epoch, tuple[list[BlockRef], list[BlockRef]]]:
        """Returns the reports that holders have stored for `census`. Each lists the references that the ledger lacks,
        and those that are unknown to the holder.

        Raises LedgerUnavailable if Redis does not answer, and LedgerDamaged if a report cannot be read.
        """
        try:
            found: dict[bytes, bytes] = self.client.hgetall(f"{self.tag}census:{census}")  # type: ignore[assignment]
        except (redis.ConnectionError, redis.TimeoutError) as error:
            raise errors.LedgerUnavailable(f"census: {error}") from error
        except redis.ResponseError as error:
            raise errors.LedgerDamaged(f"census: the data in Redis cannot be read: {error}") from error
        with replies.reading("census"):
            return {Epoch(int(epoch)): codec.unpack_report(packed) for epoch, packed in found.items()}

    def distrust(self, epoch: Epoch | None = None) -> None:
        """Requests a rebuild, because the ledger is damaged or contradicts the header. Until the rebuild, calls raise
        StaleDataset. `epoch` is the epoch of the holder whose blocks the contradiction concerns, or None. Raises Fenced
        if that holder has ended, because other holders may then have the blocks.
        """
        self._call("distrust", epoch or 0)

    def unregister(self, epoch: Epoch) -> None:
        """Ends the holder, whose references are then released. Does nothing if the holder has already ended."""
        self._call("unregister", epoch)

    def holdings(self, epoch: Epoch) -> list[BlockRef]:
        """Returns all references of the holder, oldest first, read in parts. Raises Fenced if the holder has ended."""
        held: list[BlockRef] = []
        part, place = self.holdings_after(epoch, 0)
        while part:
            held += part
            part, place = self.holdings_after(epoch, place)
        return held

    def holdings_after(self, epoch: Epoch, place: int) -> tuple[list[BlockRef], int]:
        """Returns up to CHUNK of the holder's references after `place`, oldest first, and the place of the last
        returned reference, from which the next call continues. Place 0 is before the first reference. Returns an empty
        list if no references are left. Raises Fenced if the holder has ended.
        """
        return self._ask(replies.unpack_holdings, "holdings", epoch, place, CHUNK)

    def holds(self, epoch: Epoch, refs: Sequence[BlockRef]) -> list[bool]:
        """Returns, for each of `refs`, whether the holder holds it. Raises Fenced if the holder has ended."""
        _bounded(len(refs))
        return [letter == ord("1") for letter in self._call("holds", epoch, codec.pack_refs(refs))]

    def present(self, hashes: Sequence[bytes]) -> list[bool]:
        """Returns, for each prefix hash, whether a block is indexed under it. Takes no references."""
        marks: list[bool] = []
        for part in chunks(hashes):
            unpack = partial(replies.unpack_marks, num_marks=len(part))
            marks += self._ask(unpack, "present", b"".join(part))
        return marks

    def reap(
        self, free_slots: Iterable[int] = (), *, lease_s: float = LEASE_S, gap_s: float = REAP_GAP_S, tick: int = 0
    ) -> ReapReport:
        """Makes one sweep. `free_slots` are writer slots whose locks are free. `tick` is the tick of the last report.
        Raises StaleDataset if the ledger's tick is lower.
        """
        slots = b"".join(struct.pack("<I", slot) for slot in free_slots)
        times = (_ms(lease_s), _ms(TICKET_LEASE_S), _ms(gap_s))
        return self._ask(replies.unpack_reaped, "reap", *times, slots, tick)

    def forget(self) -> None:
        """Removes the ledger's keys; later calls raise StaleDataset.

        Raises LedgerUnavailable if Redis does not answer.
        """
        try:
            self.client.delete(self.tag + "meta")
            for key in list(self.client.scan_iter(f"{self.tag}*", count=1000)):
                self.client.unlink(key)
        except (redis.ConnectionError, redis.TimeoutError) as error:
            raise errors.LedgerUnavailable(f"forget: {error}") from error

    def inspect_raw(self) -> list[Any]:
        """Returns the reply of `inspect.lua`, which `inspection` decodes."""
        reply = self._execute("inspect")
        if isinstance(reply, bytes):
            raise replies.refusal(reply)
        return list(reply)

    def clock(self) -> tuple[bytes | None, ...]:
        """Returns counters from which a reader can tell that the ledger has changed. A few changes, such as beats, do
        not alter them. Raises LedgerUnavailable if Redis does not answer, and LedgerDamaged if the counters cannot be
        read.
        """
        try:
            with replies.reading("clock"):
                return tuple(self.client.hmget(self.tag + "meta", "dataset", "tick", "epoch", "reserved", "sealed"))  # type: ignore[arg-type]
        except (redis.ConnectionError, redis.TimeoutError) as error:
            raise errors.LedgerUnavailable(f"clock: {error}") from error

    def _ask(self, unpack: Callable[[bytes], T], name: str, *args: bytes | str | int) -> T:
        reply = self._call(name, *args)
        with replies.reading(name):
            return unpack(reply)

    def _call(self, name: str, *args: bytes | str | int) -> bytes:
        reply: bytes = self._execute(name, *args)
        if reply[:1] == b"-":
            with replies.reading(name):
                refusal = replies.refusal(reply)
            raise refusal
        return reply[1:]

    def _execute(self, name: str, *args: bytes | str | int) -> Any:
        with answering(name):
            return self._scripts[name](keys=[self.tag + "meta"], args=[self.dataset, *args])


@contextmanager
def answering(name: str) -> Iterator[None]:
    """Returns a context that translates redis' errors into LedgerUnavailable if Redis does not answer the script
    `name` or refuses to run it at the moment, and into LedgerDamaged if the script fails.
    """
    try:
        yield
    except (redis.ConnectionError, redis.TimeoutError, redis.OutOfMemoryError, redis.ReadOnlyError) as error:
        raise errors.LedgerUnavailable(f"{name}: {error}") from error
    except redis.ResponseError as error:
        if _REFUSAL.search(str(error)):
            raise errors.LedgerUnavailable(f"{name}: {error}") from error
        raise errors.LedgerDamaged(f"{name}: the data in Redis cannot be read: {error}") from error


def server_run_id(client: redis.Redis) -> str:
    """Returns the `run_id` of the Redis server behind `client`."""
    info: dict[str, Any] = client.info("server")
    return str(info["run_id"])


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _bounded(num_blocks: int, most: int = CHUNK) -> int:
    if not 0 <= num_blocks <= most:
        raise ValueError(f"{num_blocks} blocks in one call exceed the limit of {most}")
    return num_blocks


def chunks(items: Sequence[T], size: int = CHUNK) -> Iterator[Sequence[T]]:
    """Yields `items` in parts of at most `size`."""
    for first in range(0, len(items), size):
        yield items[first : first + size]


def parts_of(hashes_by_group: Sequence[Sequence[bytes]]) -> Iterator[list[Sequence[bytes]]]:
    """Yields the hashes of all groups in parts of at most CHUNK hashes, heads first, up to the end of the shortest
    group.
    """
    if not hashes_by_group:
        return
    size = CHUNK // len(hashes_by_group)
    for first in range(0, min(map(len, hashes_by_group)), size):
        yield [hashes[first : first + size] for hashes in hashes_by_group]
