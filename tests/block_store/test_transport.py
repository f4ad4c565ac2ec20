"""The checks before and after a copy: a source whose blocks are reallocated meanwhile, and a transport that writes too
late.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from block_store.errors import Exhausted, Stale
from block_store.holder.attach import Attached, Needs
from block_store.redis.redis_server import RedisHandle
from block_store.transfer import frames
from block_store.transfer.block_source import BlockSource
from block_store.transfer.known_tickets import KnownTickets
from block_store.transfer.pulled_blocks import copied_tokens, leading_blocks
from block_store.transfer.puller import Puller
from block_store.transfer.source_client import SourceClient
from block_store.transfer.transport import Copy
from common import rpc
from common.errors import Unavailable
from common.ticket import Ticket, TicketId
from common.types import BlockRef, Epoch
from protos.v1 import block_store_pb2 as pb
from testing.ledger.store import LAYOUT, TestStore, chain
from testing.planted_bug import plant

NAMES = chain("late", 2)
SOURCE = Ticket("elsewhere", TicketId(Epoch(1), b"s"), (((BlockRef(0, 1), BlockRef(1, 1)),),), (32,))


@pytest.mark.parametrize("when", ["before", "while"])
def test_a_block_that_is_reallocated_before_or_while_it_is_read_is_not_sent(store: TestStore, when: str) -> None:
    caller = store.caller()
    refs = store.fill(caller, chain("a", 2))
    source, view = BlockSource(store.arena, store.ledger, KnownTickets()), store.arena.views

    def reallocate() -> None:
        store.arena.raise_generations([BlockRef(refs[1].block, refs[1].generation + 1)], caller.slot.number)

    def viewing(blocks: Any) -> Any:
        reallocate()
        return view(blocks)

    assert len(frames.decode(source.read(0, refs)).digests) == 2
    if when == "before":
        reallocate()
    else:
        store.arena.views = viewing  # type: ignore[method-assign]
    with pytest.raises(Stale):
        source.read(0, refs)


async def test_the_channel_to_a_source_that_is_not_asked_any_more_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source has vanished. An open channel would try to connect to it forever."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    client = SourceClient()
    with pytest.raises(Unavailable):
        await client.keep(address, SOURCE)
    await client.refresh()
    assert list(client._channels._pooled) == [address]
    monkeypatch.setattr(rpc, "IDLE_S", 0.0)
    await client.refresh()
    assert not client._channels._pooled
    with pytest.raises(Unavailable):
        await client.keep(address, SOURCE)
    await client.close()


class LateTransport:
    """A transport that fails, and writes to its destination only when told to, as one-sided transports may."""

    def __init__(self) -> None:
        self.copies: list[Copy] = []
        self.has_written = False

    async def fetch(self, copy: Copy) -> None:
        self.copies.append(copy)
        raise Unavailable("the source of the blocks does not answer")

    def write(self) -> None:
        for copy in self.copies:
            for ref in copy.into:
                copy.arena.data[ref.block] = 0xEE
        self.has_written = True

    def is_quiescent(self, copy: Copy) -> bool:
        return self.has_written

    async def close(self) -> None: ...


class NamedBlocks:
    """A source that only returns references to blocks."""

    async def prefix_hashes(self, source: str, ticket: Ticket, refs: Any) -> list[bytes]:
        return NAMES[: len(refs)]

    async def keep(self, source: str, ticket: Ticket) -> float:
        return 8.0

    async def refresh(self) -> None: ...

    async def close(self) -> None: ...


@asynccontextmanager
async def puller_of(store: TestStore, url: str, transport: LateTransport) -> AsyncIterator[Puller]:
    """A puller of blocks into the store's arena."""
    attached = await asyncio.to_thread(Attached, store.arena, url, Needs("pull", "pull", LAYOUT, 0, 0, 0, 0))
    puller = Puller(attached, cast(SourceClient, NamedBlocks()), transport)
    upkeep = asyncio.create_task(puller.run())
    try:
        yield puller
    finally:
        upkeep.cancel()
        await puller.close()


@pytest.mark.parametrize("early", [False, True])
async def test_blocks_to_which_a_transport_may_still_write_are_given_to_nobody(
    redis_handle: RedisHandle, store: TestStore, shm: Path, early: bool
) -> None:
    transport = LateTransport()
    async with puller_of(store, redis_handle.url, transport) as receiver:
        with pytest.raises(Unavailable):
            if early:
                await receiver.early(SOURCE, "elsewhere:1").__aenter__()
            else:
                await receiver.pull(SOURCE, "elsewhere:1")
        assert receiver.num_withheld == 2
        worker = store.held("other")
        everything_else = worker.alloc(store.arena.num_blocks - 2)
        with pytest.raises(Exhausted):
            worker.alloc(1)
        await asyncio.sleep(0.6)  # longer than the upkeep's interval: time alone releases nothing
        with pytest.raises(Exhausted):
            worker.alloc(1)
        transport.write()
        assert all(store.arena.read(ref.block)[0] != 0xEE for ref in everything_else)
        while receiver.num_withheld:
            await asyncio.sleep(0.01)
        async with asyncio.timeout(60):  # until the ledger, whose Redis may pause, has been told
            while store.moment().counts.free + store.moment().counts.cached < 2:
                await asyncio.sleep(0.01)
        assert len(worker.alloc(2)) == 2
        worker.close()


BUGS = {
    "blocks of a failed copy are released at once": ("_undo", "if self._transport.is_quiescent(copy):", "if True:"),
    "withheld blocks are released by time alone": ("_upkeep", " if self._transport.is_quiescent(pair[0])]", "]"),
}
"""Method of `Puller`, text in its source, and replacement."""


@pytest.mark.parametrize("name", BUGS)
async def test_a_missing_question_to_the_transport_is_noticed(
    redis_handle: RedisHandle, store: TestStore, shm: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    plant(monkeypatch, Puller, *BUGS[name])
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        await test_blocks_to_which_a_transport_may_still_write_are_given_to_nobody(redis_handle, store, shm, False)


def test_copied_positions_are_counted_once() -> None:
    a, b, tail, other = (BlockRef(block, 1) for block in range(4))
    ticket = Ticket("x", SOURCE.id, (((a, b, tail),), ((a, b, other),)), (40, 36))
    assert copied_tokens(ticket, {a, b, tail, other}, 16) == 16 + 16 + 8 + 4
    assert copied_tokens(ticket, {tail}, 16) == 8
    windowed = Ticket("x", SOURCE.id, (((a, b, tail), (other,)),), (40,))
    assert copied_tokens(windowed, {b, other}, 16) == 16 + 8, "a window has only the last blocks"
    assert copied_tokens(windowed, (), 16) == 0


def test_public_blocks_are_those_that_hold_public_tokens_alone() -> None:
    a, b, tail, other = (BlockRef(block, 1) for block in range(4))
    ticket = Ticket("x", SOURCE.id, (((a, b, tail), (other,)),), (40,))
    assert leading_blocks(ticket, 33, 16) == {a, b}
    assert leading_blocks(ticket, 31, 16) == {a}
    assert leading_blocks(ticket, 48, 16) == {a, b, tail, other}, "a window has only the last blocks"


def test_a_frame_is_the_message_of_the_proto() -> None:
    blocks, digests = [b"\x01" * 300, memoryview(b"\x02" * 300)], [2**64 - 1, 7]
    message = pb.ReadBlocksResponse.FromString(frames.encode(5, blocks, digests))
    assert (message.index, message.data, list(message.digests)) == (5, b"\x01" * 300 + b"\x02" * 300, digests)
    frame = frames.decode(message.SerializeToString())
    assert (frame.index, frame.data, frame.digests) == (5, message.data, digests)


@pytest.mark.parametrize("damaged", [b"\x12\x05abc", b"\x12", b"\x22\x03abc", b"\x80" * 12, b"\x2a\x00", b"\x0d\x01"])
def test_bytes_that_are_no_frame_are_refused(damaged: bytes) -> None:
    with pytest.raises(ValueError, match="frame"):
        frames.decode(damaged)
