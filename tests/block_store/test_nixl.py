"""Blocks that travel over NIXL, between real agent processes, over TCP because there is no RDMA here
(`make test-nixl`). NIXL writes late: after a read was given up, its bytes still arrive.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest

from block_store.errors import Exhausted
from block_store.holder.attach import Attached, Needs
from block_store.holder.held_blocks import HeldBlocks
from block_store.ledger.reaper import sweep
from block_store.redis.redis_server import RedisHandle
from block_store.server.sources import as_statuses
from block_store.transfer import nixl_agent, nixl_transport
from block_store.transfer.block_source import BlockSource
from block_store.transfer.known_tickets import KnownTickets
from block_store.transfer.nixl_agent import NixlAgent
from block_store.transfer.nixl_process import PACKAGES
from block_store.transfer.nixl_transport import NixlTransport
from block_store.transfer.puller import Puller
from block_store.transfer.source_client import Located, SourceClient
from block_store.transfer.transport import Copy
from common import convert
from common.errors import Aborted, FailedPrecondition, StartupError, Unavailable
from common.ticket import Ticket, TicketId
from common.types import BlockRef
from testing.ledger.hosts import Host
from testing.ledger.store import LAYOUT, TestStore, chain, wait_until
from testing.planted_bug import plant

pytestmark = [
    pytest.mark.nixl,
    pytest.mark.skipif(not any(map(find_spec, PACKAGES)), reason="NIXL is not installed (make test-nixl)"),
]
NUM_COPIED = 6
MINE = 0xAA
"""What another holder writes into its blocks."""
LONG_S = 600.0


class Source:
    """The source's store, in this process, with an agent in its own."""

    def __init__(self, store: TestStore, agent: NixlAgent) -> None:
        self._source = BlockSource(store.arena, store.ledger, KnownTickets())
        self.store = store
        self.agent: NixlAgent | None = agent

    async def prefix_hashes(self, source: str, ticket: Ticket, refs: Sequence[BlockRef]) -> list[bytes]:
        with as_statuses():
            return await asyncio.to_thread(self._source.keep, ticket.id, refs)

    async def locate(self, source: str, ticket: Ticket, refs: Sequence[BlockRef]) -> Located:
        if self.agent is None:
            raise FailedPrecondition("there is no agent")
        mapped = await self.agent.use(self.store.arena)
        with as_statuses():
            digests = await asyncio.to_thread(self._source.sealed_digests, ticket.id, refs)
        return Located(mapped.agent, mapped.address, LAYOUT.block_bytes, digests)

    async def keep(self, source: str, ticket: Ticket) -> float:
        await self.prefix_hashes(source, ticket, ())
        return 8.0

    async def refresh(self) -> None: ...

    async def close(self) -> None: ...


class Elsewhere:
    """The transport that is used if there is no agent."""

    def __init__(self) -> None:
        self.copies: list[Copy] = []

    async def fetch(self, copy: Copy) -> None:
        self.copies.append(copy)
        raise Unavailable("there is no other transport")

    async def close(self) -> None: ...


class Ends:
    """A source with a ticket for six blocks, and a destination that has already read a block from it."""

    def __init__(
        self, source: Source, destination: TestStore, attached: Attached, agent: NixlAgent, upkeep: AsyncExitStack
    ) -> None:
        self.source, self.destination, self.attached, self.agent = source, destination, attached, agent
        self.elsewhere = Elsewhere()
        sources = cast(SourceClient, source)
        other = cast(nixl_transport.Transport, self.elsewhere)
        self.transport = NixlTransport(sources, other, agent, lambda: attached.held.writer_slot)
        self.puller = Puller(attached, sources, self.transport)
        self.caller = source.store.caller()
        self.refs, self.ticket = self.fill("late", NUM_COPIED)

    def fill(self, name: str, length: int) -> tuple[list[BlockRef], Ticket]:
        store = self.source.store
        refs = store.fill(self.caller, chain(name, length))
        ticket = store.ledger.hand_over(self.caller.lane(), refs)
        return refs, Ticket(store.arena.arena_id, ticket, ((tuple(refs),),), (16 * length,))

    async def pull(self, ticket: Ticket | None = None) -> list[bytes]:
        """Pulls a ticket's blocks. Returns the bytes of the copies."""
        pulled = await self.puller.pull(ticket or self.ticket, "a:1")
        worker = self.destination.held("decode")
        [[table]] = worker.claim(pulled.ticket)
        copies = [self.destination.arena.read(ref.block) for ref in table]
        worker.release(table)
        worker.close()
        return copies

    def sent(self, refs: Sequence[BlockRef]) -> list[bytes]:
        return [self.source.store.arena.read(ref.block) for ref in refs]

    async def give_up(self) -> None:
        """Pulls from a frozen source, and cancels the pull once its read has been posted."""
        pulling = asyncio.create_task(self.pull())
        while not self.agent._reads:
            await asyncio.sleep(0.01)
        pulling.cancel()
        with suppress(asyncio.CancelledError):
            await pulling
        await asyncio.sleep(0.6)  # longer than the upkeep's interval: time alone releases nothing

    async def returned(self, num_reserved: int = 0) -> None:
        """Waits until the failed pull's blocks are released, and others hold `num_reserved` blocks."""
        async with asyncio.timeout(60):
            while self.puller.num_withheld or self.destination.moment().counts.reserved != num_reserved:
                await asyncio.sleep(0.01)

    def take_all(self, leave: int = 0) -> tuple[HeldBlocks, list[BlockRef]]:
        """Returns another holder, with all blocks that it can get except `leave`. It writes MINE into them."""
        worker, mine = self.destination.held("other"), list[BlockRef]()
        with suppress(Exhausted):
            while True:
                mine += worker.alloc(1)
        worker.release(mine[:leave])
        for ref in mine[leave:]:
            self.destination.arena.data[ref.block] = MINE
        return worker, mine[leave:]

    def assert_intact(self, mine: Sequence[BlockRef]) -> None:
        expected = bytes([MINE]) * LAYOUT.block_bytes
        assert all(self.destination.arena.read(ref.block) == expected for ref in mine), "a late write hit a live block"

    def num_arrived(self) -> int:
        """Returns how many of the six blocks are somewhere in the destination's memory."""
        arena = self.destination.arena
        return len({arena.read(block) for block in range(arena.num_blocks)} & set(self.sent(self.refs)))


@contextmanager
def frozen(pid: int | None) -> Iterator[None]:
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.fixture
async def ends(redis_handle: RedisHandle, store: TestStore, shm: Path) -> AsyncIterator[Ends]:
    destination = TestStore(redis_handle.client, shm / "destination", 10)
    async with AsyncExitStack() as stack:
        sending = await stack.enter_async_context(NixlAgent(over_tcp=True))
        reading = await stack.enter_async_context(NixlAgent(over_tcp=True))
        await reading.use(destination.arena)
        needs = Needs("pull", "pull", LAYOUT, 0, 0, 0, 0)
        attached = await asyncio.to_thread(Attached, destination.arena, redis_handle.url, needs)
        pair = Ends(Source(store, sending), destination, attached, reading, stack)
        upkeep = asyncio.create_task(pair.puller.run())
        refs, ticket = pair.fill("first", 1)
        assert await pair.pull(ticket) == pair.sent(refs)
        yield pair
        upkeep.cancel()
        await pair.puller.close()
    destination.close()


async def test_blocks_arrive_in_windows_and_are_found_again(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_transport, "WINDOW_BLOCKS", 4)
    for _ in range(2):
        assert await ends.pull() == ends.sent(ends.refs)
    assert ends.agent._num_reads == 1 + 2 and not ends.elsewhere.copies
    assert not ends.transport.fallbacks.counts


async def test_a_source_without_an_agent_is_read_otherwise(ends: Ends) -> None:
    ends.source.agent = None
    with pytest.raises(Unavailable, match="no other transport"):
        await ends.pull()
    assert len(ends.elsewhere.copies) == 1 and ends.transport.fallbacks.counts == {"blocks not over NIXL": 1}


async def check_cancelled(ends: Ends) -> None:
    """A pull is cancelled while its source is frozen. What the read writes later hits nobody's blocks. It has ended
    when the agent says so.
    """
    process = ends.agent.pid
    with frozen(cast(NixlAgent, ends.source.agent).pid):
        await ends.give_up()
        worker, mine = ends.take_all()
        assert ends.num_arrived() == 0
    async with asyncio.timeout(60):
        while ends.agent._reads:
            await asyncio.sleep(0.01)
    ends.assert_intact(mine)
    assert ends.num_arrived() == NUM_COPIED, "the read did not write late, so this test shows nothing"
    await ends.returned(len(mine))
    assert len(worker.alloc(NUM_COPIED)) == NUM_COPIED and ends.agent.pid == process
    worker.close()


async def check_overdue(ends: Ends) -> None:
    """A read that does not end costs its agent its life. Only then do others get the blocks, and nothing is written
    to them.
    """
    process = ends.agent.pid
    refs, ticket = ends.fill("other", 1)
    with frozen(cast(NixlAgent, ends.source.agent).pid):
        with pytest.raises(Unavailable):
            await ends.pull()
        await ends.returned()
        worker, mine = ends.take_all(leave=1)
        assert len(mine) == ends.destination.arena.num_blocks - 1
    # Over TCP, UCX may abort the source's agent when a reader dies, and another one starts. When a later read has been
    # answered, so has the earlier one, if anybody is still there to take the answer.
    copies = list[bytes]()
    async with asyncio.timeout(60):
        while not copies:
            with suppress(Unavailable):
                copies = await ends.pull(ticket)
            ends.elsewhere.copies.clear()
    assert copies == ends.sent(refs)
    ends.assert_intact(mine)
    assert ends.agent.pid != process
    worker.close()


async def check_slot(ends: Ends) -> None:
    """A store dies, and its agent does not: the blocks stay in quarantine until the agent is dead, too."""
    store, slot = ends.destination, ends.attached.held.writer_slot
    with frozen(cast(NixlAgent, ends.source.agent).pid):
        await ends.give_up()
        ends.attached.held.holder.lease.end()
        slot.close()
        report = sweep(store.ledger, store.arena, ())
        async with asyncio.timeout(60):
            while store.moment().counts.reserved:  # a beat may extend the lease once more
                store.expire(ends.attached.held.epoch)
                await asyncio.sleep(0.1)
                report = sweep(store.ledger, store.arena, report.waiting_slots, report.tick)
        assert store.moment().counts.quarantine == NUM_COPIED, "the agent may still write"
        ends.agent.kill()
        await ends.returned()
        assert sweep(store.ledger, store.arena, report.waiting_slots, report.tick).num_unquarantined == NUM_COPIED


async def check_reallocated_before(ends: Ends) -> None:
    """The blocks of another request are there by now, with their own digests."""
    arena, block = ends.source.store.arena, ends.refs[3].block
    keeping, located = ends.source.prefix_hashes, ends.source.locate

    async def locate(*args: Any) -> Located:
        reallocate(ends, block)
        return await located(*args)

    async def keep(source: str, ticket: Ticket, refs: Sequence[BlockRef]) -> list[bytes]:
        is_changed = arena.generations[block] != ends.refs[3].generation
        return [b""] * len(refs) if is_changed else await keeping(source, ticket, refs)

    ends.source.locate, ends.source.prefix_hashes = locate, keep  # type: ignore[method-assign]
    with pytest.raises(Aborted):
        await ends.pull()


async def check_reallocated_meanwhile(ends: Ends) -> None:
    """A block is rewritten after the first comparison, together with its digest: only the second one tells."""
    arena, block = ends.source.store.arena, ends.refs[3].block
    check = arena.check

    def checking(*args: Any) -> bool:
        arena.check = check  # type: ignore[method-assign]
        found = check(*args)
        reallocate(ends, block)
        return found

    locate = ends.source.locate

    async def locating(*args: Any) -> Located:
        arena.check = checking  # type: ignore[method-assign]
        return await locate(*args)

    ends.source.locate = locating  # type: ignore[method-assign]
    with pytest.raises(Aborted):
        await ends.pull()


def reallocate(ends: Ends, block: int) -> None:
    arena = ends.source.store.arena
    [ref] = refs = [BlockRef(block, int(arena.generations[block]) + 1)]
    arena.raise_generations(refs, ends.caller.slot.number)
    arena.data[ref.block] = MINE
    arena.mark_sealed(refs, [bytes(range(32))], [arena.digest(block)])


async def check_changed_byte(ends: Ends) -> None:
    ends.source.store.arena.data[ends.refs[2].block, 5] ^= 1
    with pytest.raises(Aborted, match="differ from those"):
        await ends.pull()


async def check_foreign_ticket(ends: Ends) -> None:
    named = [*ends.refs[:5], *ends.source.store.fill(ends.caller, chain("unheld", 1))]

    async def hashes(source: str, ticket: Ticket, refs: Sequence[BlockRef]) -> list[bytes]:
        return [b""] * len(refs)

    ends.source.prefix_hashes = hashes  # type: ignore[method-assign]
    for wrong in (TicketId(ends.ticket.id.epoch, bytes(16)), ends.ticket.id):
        with pytest.raises(Exception, match="the ticket"):
            await ends.source.locate("", Ticket("x", wrong, (((tuple(named)),),), (96,)), named)


LAST_WORDS = 'logger.warning("the NIXL agent is killed: %s", reason)\n        '
GIVE_UP = """for number in list(self._reads):
            self._reads.pop(number).set_exception(_unavailable("has given up"))
"""
Check = Callable[[Ends], Coroutine[Any, Any, None]]
CHECKS: dict[str, Check] = {name[6:]: check for name, check in list(globals().items()) if name.startswith("check_")}


@pytest.mark.parametrize("name", CHECKS)
async def test_nothing_wrong_arrives_and_nothing_is_written_late(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(nixl_agent, "READ_S", 0.3 if name == "overdue" else LONG_S)
    await CHECKS[name](ends)


BUGS: dict[str, tuple[type, str, str, str, Check]] = {
    "a cancelled read counts as ended": (
        NixlTransport, "is_quiescent", "copy.writing is None or copy.writing.done()", "True", check_cancelled
    ),
    "blocks are released without a question": (
        Puller, "_undo", "if self._transport.is_quiescent(copy):", "if True:", check_cancelled
    ),
    "withheld blocks are released without a question": (
        Puller, "_upkeep", " if self._transport.is_quiescent(pair[0])]", "]", check_cancelled
    ),
    "a read is given up, and its agent lives": (
        NixlAgent, "_end", LAST_WORDS + "self.kill()\n", LAST_WORDS + GIVE_UP, check_overdue
    ),
    "the agent does not keep the slot": (
        NixlAgent, "read", "[slot.fileno()]", "[os.open(os.devnull, os.O_RDONLY)]", check_slot
    ),
    "generations not compared before the read": (
        BlockSource, "_check_sealed", "not self.arena.check(ids, generations) or ", "", check_reallocated_before
    ),
    "generations not compared after the read": (
        NixlTransport, "_fetch_window", "await self._sources.prefix_hashes(copy.source, copy.ticket, refs)", "pass",
        check_reallocated_meanwhile,
    ),
    "digests not compared": (
        Copy, "accept", "self.arena.digest(ref.block) != digest", "False", check_changed_byte
    ),
    "tickets not checked": (
        BlockSource, "sealed_digests", "for part in chunks(refs):", "for part in ():", check_foreign_ticket
    ),
}  # fmt: skip
"""Method, text in the source of its module, replacement, and the check that notices."""


@pytest.mark.parametrize("name", BUGS)
async def test_a_missing_check_is_noticed(ends: Ends, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    owner, method, right, wrong, check = BUGS[name]
    plant(monkeypatch, owner, method, right, wrong)
    monkeypatch.setattr(nixl_agent, "READ_S", 0.3 if check is check_overdue else LONG_S)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        await check(ends)


async def test_without_rdma_nixl_is_refused() -> None:
    if any(Path("/sys/class/infiniband").glob("*")):
        pytest.skip("there is an RDMA device")
    with pytest.raises(StartupError, match=r"UCX_TLS=ib\)\. NIXL is not used over TCP: a cancelled read"):
        async with NixlAgent():
            pytest.fail("NIXL uses TCP")


def test_two_stores_copy_over_nixl(shm: Path) -> None:
    flags = ("--transport", "nixl", "--nixl-over-tcp")
    a, b = Host(shm / "a", 12, *flags), Host(shm / "b", 12, "--pull-blocks", *flags)
    blocks, tail = a.fill(chain("real", 4), partial=True)
    ticket = a.hand_over([[blocks + tail]])
    agents = [child for host in (a, b) for child in agents_of(host.store.process.pid)]
    assert len(agents) == 3, "one that others read from in each store, and one that reads"
    copies = convert.ticket_from_pb(b.pull(a, ticket).ticket)
    assert b.bytes_of(copies) == a.bytes_of(ticket)
    b.claim_and_release(copies)
    a.end(ticket)
    for host in (a, b):
        host.assert_idle()
    a.held.holder.lease.end()
    a.store.kill()
    log = b.store.stop()
    assert "are read over NIXL" in log and "fallback" not in log
    wait_until(lambda: not any(map(is_running, agents)))  # also those of the store that was killed


def is_running(pid: int) -> bool:
    with suppress(FileNotFoundError):
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())  # that of a zombie is empty
    return False


def agents_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if b"nixl_process" in Path(f"/proc/{child}/cmdline").read_bytes()]
