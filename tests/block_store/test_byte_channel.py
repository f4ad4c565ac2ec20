"""Byte channels between two arenas: real sockets, with and without TLS, with a relay that changes or holds up bytes."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest

from block_store.arena.arena import Arena
from block_store.errors import Stale
from block_store.transfer import byte_channel, byte_transport, channels
from block_store.transfer.block_source import BlockSource
from block_store.transfer.byte_server import ByteServer
from block_store.transfer.byte_transport import ByteTransport, _Receiving
from block_store.transfer.known_tickets import KnownTickets
from block_store.transfer.source_client import SourceClient
from block_store.transfer.transport import Copy
from common import convert
from common.errors import Aborted, Unavailable
from common.ticket import Ticket, TicketId
from common.trust import NO_TRUST, Trust, TrustFiles
from common.types import BlockRef
from looseleaf.cli import main
from protos.v1 import block_store_pb2 as pb
from testing.ledger.relay import Relay
from testing.ledger.store import LAYOUT, TestStore, chain
from testing.planted_bug import plant

NUM_BLOCKS = 8


@dataclass
class Port:
    """A source that has said where its byte channels are."""

    number: int

    def byte_port(self, source: str) -> int:
        return self.number


class Elsewhere:
    """The transport that is used if there is no byte channel."""

    def __init__(self) -> None:
        self.copies: list[Copy] = []

    async def fetch(self, copy: Copy) -> None:
        self.copies.append(copy)

    def is_quiescent(self, copy: Copy) -> bool:
        return True

    async def close(self) -> None: ...


class Ends:
    """A source arena with a ticket for six blocks, a relay, and a destination arena."""

    def __init__(self, store: TestStore, destination: Arena, trust: Trust, client_trust: Trust) -> None:
        self.store = store
        self.source = BlockSource(store.arena, store.ledger, KnownTickets())
        self.server = ByteServer("127.0.0.1", 0, trust, lambda arena_id: self.source)
        self.relay = Relay(self.server.listen())
        self.elsewhere = Elsewhere()
        sources = cast(SourceClient, Port(self.relay.port))
        self.transport = ByteTransport(sources, self.elsewhere, 4, client_trust)
        self.caller = store.caller()
        self.refs = store.fill(self.caller, chain("bytes", 6))
        self.ticket = store.ledger.hand_over(self.caller.lane(), self.refs)
        self.destination = destination
        self.stored: list[int] = []

    def copy(self, ticket: TicketId | None = None) -> Copy:
        """Returns a copy of the ticket's blocks into blocks that are not all neighbours."""
        blocks = [5, 6, 7, 1, 0, 2]
        into = [BlockRef(block, int(self.destination.generations[block]) + 1) for block in blocks]
        self.destination.raise_generations(into, 1)
        named = Ticket(self.store.arena.arena_id, ticket or self.ticket, ((tuple(self.refs),),), (96,))
        return Copy("127.0.0.1:1", named, self.refs, into, self.destination, self.stored.extend)

    def assert_copied(self, copy: Copy) -> None:
        pairs = zip(copy.refs, copy.into, strict=True)
        assert all(self.store.arena.read(a.block) == copy.arena.read(b.block) for a, b in pairs)
        assert self.stored == [self.store.arena.digest(ref.block) for ref in self.refs]
        assert copy.num_stored == 6 and self.transport.is_quiescent(copy)

    async def open_channel(self) -> socket.socket:
        """Copies the blocks once. Returns the channel, which is idle then."""
        await self.transport.fetch(self.copy())
        self.stored.clear()
        [[idle]] = self.transport._channels._idle.values()
        return idle.connection

    def assert_unwatched(self, connection: socket.socket) -> None:
        """Asserts that the channel is as it was before the event loop waited for an answer."""
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
        assert not asyncio.get_running_loop().remove_reader(connection)

    def close(self) -> None:
        self.relay.close()
        self.server.close()


@pytest.fixture
def ends(store: TestStore, shm: Path) -> Iterator[Callable[..., Ends]]:
    made: list[Ends] = []
    destination = Arena.create(shm / "destination", LAYOUT, NUM_BLOCKS)

    def make(trust: Trust = NO_TRUST, client_trust: Trust | None = None) -> Ends:
        made.append(Ends(store, destination, trust, trust if client_trust is None else client_trust))
        return made[-1]

    yield make
    for each in made:
        each.close()
    destination.remove()


def tls(directory: Path) -> Trust:
    assert main(["certs", str(directory), "--host", "localhost"]) == 0
    return TrustFiles(None, directory / "inside.pem", directory / "inside.key", directory / "ca.pem").read()


@pytest.mark.parametrize("secured", [False, True])
async def test_blocks_arrive_and_the_connection_is_used_again(ends: Any, tmp_path: Path, secured: bool) -> None:
    pair = ends(tls(tmp_path / "certs") if secured else Trust("a secret"))
    for _ in range(3):
        pair.stored.clear()
        copy = pair.copy()
        await pair.transport.fetch(copy)
        pair.assert_copied(copy)
    assert len(pair.relay._sockets) == 3, "one connection, and the listener"
    assert not pair.elsewhere.copies


async def test_a_source_that_has_started_again_is_connected_again(ends: Any) -> None:
    pair = ends()
    await pair.transport.fetch(pair.copy())
    for each in pair.relay._sockets[1:]:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
    pair.stored.clear()
    await pair.transport.fetch(copy := pair.copy())
    pair.assert_copied(copy)


@pytest.mark.parametrize("what", ["certificate", "port"])
async def test_a_pull_that_gets_no_channel_reads_over_grpc(ends: Any, tmp_path: Path, what: str) -> None:
    pair = ends(tls(tmp_path / "ours"), tls(tmp_path / "theirs")) if what == "certificate" else ends()
    if what == "port":
        pair.relay.close()
    copies = [pair.copy(), pair.copy()]
    num_connections = len(pair.relay._sockets)
    for copy in copies:
        await pair.transport.fetch(copy)
    assert pair.elsewhere.copies == copies and pair.transport.fallbacks.counts == {"blocks over gRPC": 2}
    assert len(pair.relay._sockets) <= num_connections + 2, "the second pull does not try the port again"
    assert not pair.stored


async def test_without_the_secret_nothing_is_sent(ends: Any) -> None:
    pair = ends(Trust("a secret"), Trust("a guess"))
    with pytest.raises(Unavailable):
        await pair.transport.fetch(pair.copy())
    assert not pair.stored


async def test_only_the_tickets_owner_reads(ends: Any) -> None:
    pair = ends()
    with pytest.raises(Aborted):
        await pair.transport.fetch(pair.copy(TicketId(pair.ticket.epoch, bytes(16))))
    other = pair.store.fill(pair.caller, chain("other", 1))
    copy = pair.copy()
    copy.refs = [*pair.refs[:5], *other]
    with pytest.raises(Aborted):
        await pair.transport.fetch(copy)
    assert not pair.stored


async def test_the_bytes_of_a_reallocated_block_are_not_sent(ends: Any) -> None:
    """Another tenant's block may be there by now. The comparison after the copy would be too late."""
    pair = ends()
    other = [BlockRef(pair.refs[3].block, pair.refs[3].generation + 1)]
    pair.store.arena.raise_generations(other, pair.caller.slot.number)
    pair.store.arena.mark_sealed(other, None, [1])
    with pytest.raises(Stale), pair.source.reading(pair.refs):
        pytest.fail("the blocks would be sent")


@pytest.mark.parametrize("is_open", [False, True])
async def test_a_block_that_is_reallocated_while_it_is_sent_does_not_count(ends: Any, is_open: bool) -> None:
    """The sender has read the blocks, and they are rewritten together with their digests: only the second comparison of
    the generations tells.
    """
    pair = ends()
    if is_open:
        await pair.open_channel()
    arena, views, block = pair.store.arena, pair.store.arena.views, pair.refs[3].block

    def viewing(blocks: Any) -> Any:
        found = views(blocks)
        arena.raise_generations([BlockRef(block, int(arena.generations[block]) + 1)], pair.caller.slot.number)
        return found

    arena.views = viewing
    copy = pair.copy()
    with pytest.raises(Aborted):
        await pair.transport.fetch(copy)
    assert copy.num_stored == 0 and not pair.stored and pair.transport.is_quiescent(copy)


@pytest.mark.parametrize("is_open", [False, True])
async def test_a_ticket_that_ended_after_it_was_known_gets_no_ok(ends: Any, is_open: bool) -> None:
    """The blocks are sealed and unchanged, and the source remembers that the ticket held them."""
    pair = ends()
    if is_open:
        await pair.open_channel()
    assert len(pair.source.keep(pair.ticket, pair.refs)) == 6
    pair.store.ledger.give_up(pair.ticket)
    sent: list[int] = []
    views = pair.store.arena.views
    pair.store.arena.views = lambda blocks: sent.append(len(blocks)) or views(blocks)
    for _ in range(2):
        copy = pair.copy()
        with pytest.raises(Aborted, match="no longer has"):
            await pair.transport.fetch(copy)
        assert copy.num_stored == 0 and not pair.stored
    assert sent == [6], "the second request gets no bytes"


async def test_a_short_answer_takes_no_thread_unless_it_is_late(ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_channel, "STALL_S", 30.0)
    pair = ends()
    connection = await pair.open_channel()
    await pair.transport.fetch(copy := pair.copy())
    pair.assert_copied(copy)
    assert copy.writing is None
    pair.assert_unwatched(connection)
    pair.stored.clear()
    pair.relay.is_open.clear()
    fetching = asyncio.create_task(pair.transport.fetch(copy := pair.copy()))
    turns = [time.monotonic()]
    while copy.writing is None:
        await asyncio.sleep(0.01)
        turns.append(time.monotonic())
    assert max(after - before for before, after in pairwise(turns)) < 15.0, "the event loop was blocked"
    pair.relay.is_open.set()
    await fetching
    pair.assert_copied(copy)
    pair.assert_unwatched(connection)
    assert await pair.open_channel() is connection


async def test_a_copy_that_is_cancelled_while_it_awaits_a_short_answer_is_quiescent(
    ends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(byte_transport, "SHORT_S", 600.0)
    pair = ends()
    connection = await pair.open_channel()
    pair.relay.is_open.clear()
    fetching = asyncio.create_task(pair.transport.fetch(copy := pair.copy()))
    await asyncio.sleep(0.05)
    assert not fetching.done() and copy.writing is None
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert pair.transport.is_quiescent(copy) and connection.fileno() == -1
    pair.relay.is_open.set()
    await pair.transport.fetch(copy := pair.copy())
    pair.assert_copied(copy)


async def test_a_copy_that_is_cancelled_before_its_thread_begins_gives_its_channel_up(
    ends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(byte_transport, "SHORT_BYTES", 0)
    pair = ends()
    connection = await pair.open_channel()
    hold = threading.Event()
    busy = [pair.transport._threads.submit(hold.wait) for _ in range(4)]
    copy = pair.copy()
    fetching = asyncio.create_task(pair.transport.fetch(copy))
    while copy.writing is None:
        await asyncio.sleep(0.01)
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert pair.transport.is_quiescent(copy) and connection.fileno() == -1
    hold.set()
    assert all(each.result(60) for each in busy)


class Slow(socket.socket):
    """A socket whose buffer takes three bytes of a message."""

    def send(self, data: Any, *flags: int) -> int:
        return super().send(data[:3], *flags)


async def test_a_channel_that_has_long_been_idle_is_closed(ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its source may have vanished. A copy from any source closes it."""
    pair = ends()
    connection = await pair.open_channel()
    assert pair.transport._channels.take(("127.0.0.1", 1)) is None and connection.fileno() >= 0
    monkeypatch.setattr(channels, "IDLE_S", 0.0)
    assert pair.transport._channels.take(("127.0.0.1", 1)) is None and connection.fileno() == -1
    await pair.transport.fetch(pair.copy())


async def test_what_an_idle_channel_does_not_take_at_once_is_sent_by_the_thread(ends: Any) -> None:
    pair = ends()
    connection = await pair.open_channel()
    [[idle]] = pair.transport._channels._idle.values()
    timeout = connection.gettimeout()
    slow = Slow(fileno=connection.detach())
    slow.settimeout(timeout)
    pair.transport._channels._idle = {("127.0.0.1", pair.relay.port): [idle._replace(connection=slow)]}
    await pair.transport.fetch(copy := pair.copy())
    pair.assert_copied(copy)
    assert len(pair.relay._sockets) == 3, "one connection, and the listener"


@pytest.mark.parametrize("is_open", [False, True])
async def test_a_byte_that_changes_on_the_way_is_found_by_the_digest(ends: Any, is_open: bool) -> None:
    pair = ends()
    head = 1 + byte_channel.FRAME_HEAD.size + 8 * len(pair.refs)
    if is_open:
        await pair.open_channel()
    else:
        head += byte_channel.NONCE_BYTES
    pair.relay.flip_after = head + 3 * LAYOUT.block_bytes
    copy = pair.copy()
    with pytest.raises(Aborted, match="differ from those"):
        await pair.transport.fetch(copy)
    assert pair.relay.flip_after is None and not pair.stored


async def test_a_silent_source_ends_the_copy_and_a_cancelled_one_is_quiescent_soon(
    ends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(byte_channel, "STALL_S", 600.0)
    monkeypatch.setattr(byte_transport, "SHORT_BYTES", 0)
    pair = ends()
    await pair.open_channel()
    pair.relay.is_open.clear()
    cancelled = pair.copy()
    fetching = asyncio.create_task(pair.transport.fetch(cancelled))
    while cancelled.writing is None:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert not pair.transport.is_quiescent(cancelled), "its thread still waits for bytes"
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    async with asyncio.timeout(60):
        while not pair.transport.is_quiescent(cancelled):
            await asyncio.sleep(0.01)
    monkeypatch.setattr(byte_channel, "STALL_S", 0.3)
    with pytest.raises(Unavailable):
        await pair.transport.fetch(pair.copy())
    assert not pair.stored


@pytest.mark.parametrize("junk", [b"\xff\xff\xff\xff", b"\x04\x00\x00\x00\xff\xff\xff\xff", b"\x01\x00"])
async def test_a_request_that_is_none_ends_its_connection_alone(ends: Any, junk: bytes) -> None:
    pair = ends()
    for has_secret in (False, True):
        with socket.create_connection(("127.0.0.1", pair.server.listen()), timeout=60) as connection, suppress(OSError):
            nonce = byte_channel.Receiver(connection).take(byte_channel.NONCE_BYTES)
            connection.sendall((byte_channel.proof(None, nonce) if has_secret else bytes(32)) + junk)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""
    await pair.transport.fetch(copy := pair.copy())
    pair.assert_copied(copy)


async def test_a_table_with_a_block_without_a_generation_is_refused(ends: Any) -> None:
    pair = ends()
    table = convert.table_to_pb(pair.refs)
    del table.generations[3:]
    request = pb.ReadBlocksRequest(
        arena_id=pair.store.arena.arena_id, table=table, ticket_epoch=pair.ticket.epoch,
        ticket_secret=pair.ticket.secret,
    ).SerializeToString()  # fmt: skip
    with socket.create_connection(("127.0.0.1", pair.server.listen()), timeout=60) as connection:
        nonce = byte_channel.Receiver(connection).take(byte_channel.NONCE_BYTES)
        connection.sendall(byte_channel.proof(None, nonce) + byte_channel.SIZE.pack(len(request)) + request)
        assert connection.recv(2) == bytes([byte_channel.Mark.NOT_HELD])


Check = Callable[[Any], Coroutine[Any, Any, None]]
BUGS: dict[str, tuple[type, str, str, str, Check]] = {
    "generations not compared before the read": (
        BlockSource, "_check_sealed", "not self.arena.check(ids, generations) or ", "",
        test_the_bytes_of_a_reallocated_block_are_not_sent,
    ),
    "generations not compared after the read": (
        BlockSource, "reading", "if not self.arena.check(ids, generations):\n", "if False:\n",
        partial(test_a_block_that_is_reallocated_while_it_is_sent_does_not_count, is_open=True),
    ),
    "a frame without the sender's OK": (
        _Receiving, "_frame", "(mark := _mark(receiver)) is not Mark.OK", "(mark := _mark(receiver)) is None",
        partial(test_a_block_that_is_reallocated_while_it_is_sent_does_not_count, is_open=True),
    ),
    "a known ticket not confirmed": (
        ByteServer, "_answer", "if not part.is_confirmed:\n", "if False:\n",
        partial(test_a_ticket_that_ended_after_it_was_known_gets_no_ok, is_open=True),
    ),
    "digests not compared": (
        Copy, "accept", "self.arena.digest(ref.block) != digest", "False",
        partial(test_a_byte_that_changes_on_the_way_is_found_by_the_digest, is_open=True),
    ),
    "tickets not checked": (
        BlockSource, "parts", "self._find(ticket, chunk)", "pass", test_only_the_tickets_owner_reads
    ),
}  # fmt: skip
"""Method, text in the source of its module, replacement, and the test that notices."""


@pytest.mark.parametrize("name", BUGS)
async def test_a_missing_check_is_noticed(ends: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    owner, method, right, wrong, check = BUGS[name]
    plant(monkeypatch, owner, method, right, wrong)
    with pytest.raises((AssertionError, pytest.fail.Exception, Unavailable)):
        await check(ends)
