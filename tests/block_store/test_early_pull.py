"""Copies of blocks whose prompt is still being computed, between two real stores."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import pytest

from block_store.transfer.arrivals import Arrivals
from block_store.transfer.source_lease import KEEP_S
from common import convert
from common.errors import Aborted, Unavailable
from testing.chaos.rewriter import without_floors
from testing.ledger.hosts import Host
from testing.ledger.store import chain

NUM_BLOCKS, FLOOR = 32, 8


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    with TemporaryDirectory(dir="/dev/shm", prefix="ll-early-") as root:  # test runs of one machine share /dev/shm
        pair = Host(Path(root) / "a", NUM_BLOCKS), Host(Path(root) / "b", NUM_BLOCKS, "--pull-blocks", floor=FLOOR)
        yield pair
        for host in pair:
            host.stop()


def evict(host: Host) -> None:
    """Makes the host forget every cached block that nobody holds."""
    with without_floors(host.held.holder.ledger):
        state = host.store.inspect()
        host.held.release(host.held.alloc(state.free + state.cached))


def test_a_pull_finds_what_came_early_although_all_other_blocks_were_evicted(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    blocks, _ = a.fill(chain("whole", 6))
    calls = []
    for part in (blocks[:2], blocks[2:5]):
        a.held.share(part)
        calls.append(b.pull_early(a, a.hand_over([[part]])))
    assert [call.num_tokens for call in calls] == [32, 48]
    evict(b)
    assert b.held.present(chain("whole", 6)) == [True] * 5 + [False]

    ticket = a.hand_over([[blocks]])
    pulled = b.pull(a, ticket)
    assert (pulled.num_pulled, pulled.num_found, pulled.num_tokens, pulled.num_early_tokens) == (6, 0, 96, 80)
    for call in calls:
        call.cancel()
    evict(b)
    copies = convert.ticket_from_pb(pulled.ticket)
    assert b.bytes_of(copies) == a.bytes_of(ticket)
    b.claim_and_release(copies)

    again = b.pull(a, ticket)
    assert (again.num_pulled, again.num_found, again.num_early_tokens) == (0, 6, 0), "nothing came early this time"
    b.claim_and_release(convert.ticket_from_pb(again.ticket))
    a.end(ticket)
    for host in hosts:
        host.assert_idle()


def test_what_came_early_is_held_for_as_long_as_the_call_is_open(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    blocks, _ = a.fill(chain("kept", 2))
    call = b.pull_early(a, a.hand_over([[blocks]]))
    [ticket] = [h for h in b.store.inspect().holders if h.name == "ticket"]
    time.sleep(2 * KEEP_S)
    [later] = [h for h in b.store.inspect().holders if h.name == "ticket"]
    assert later.epoch == ticket.epoch and later.lease_ms > ticket.lease_ms - 1000 * KEEP_S, "its lease was extended"
    call.cancel()
    b.assert_idle()
    evict(b)
    assert not any(b.held.present(chain("kept", 2)))


def test_an_early_pull_leaves_room_for_the_largest_group(hosts: tuple[Host, Host]) -> None:
    """Of 32 blocks, 8 are the worker's floor, and 8 must stay free for the largest group."""
    a, b = hosts
    evict(b)
    blocks, _ = a.fill(chain("large", 17))
    a.held.share(blocks)
    with pytest.raises(grpc.RpcError) as found:
        b.pull_early(a, a.hand_over([[blocks]]))
    assert found.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    a.held.share(blocks[:16])
    call = b.pull_early(a, a.hand_over([[blocks[:16]]]))
    others, _ = a.fill(chain("other", 8))
    ticket = a.hand_over([[others]])
    b.claim_and_release(convert.ticket_from_pb(b.pull(a, ticket).ticket))
    a.end(ticket)
    call.cancel()
    a.held.release(blocks)
    for host in hosts:
        host.assert_idle()


def test_an_early_pull_does_not_overtake_a_pull_that_waits_for_room(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    evict(b)
    taken = b.held.alloc(NUM_BLOCKS - FLOOR - 1)
    blocks, _ = a.fill(chain("waiting", 12))
    ticket = a.hand_over([[blocks]])
    waiting = b.stub.Pull.future(b.request(a, ticket), timeout=60)
    time.sleep(0.3)
    small, _ = a.fill(chain("small", 1))
    with pytest.raises(grpc.RpcError) as found:
        b.pull_early(a, a.hand_over([[small]]))
    assert found.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and not waiting.done()
    b.held.release(taken)
    b.claim_and_release(convert.ticket_from_pb(waiting.result().ticket))
    a.end(ticket)
    b.assert_idle()


def test_changed_bytes_end_an_early_pull_and_the_pull_copies_them_again(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    blocks, _ = a.fill(chain("changed", 3))
    a.held.share(blocks)
    a.arena.data[blocks[1].block, 5] ^= 1  # after the seal, as a faulty network would
    with pytest.raises(grpc.RpcError) as found:
        b.pull_early(a, a.hand_over([[blocks]]))
    assert found.value.code() is grpc.StatusCode.ABORTED
    a.arena.data[blocks[1].block, 5] ^= 1
    ticket = a.hand_over([[blocks]])
    pulled = b.pull(a, ticket)
    assert b.bytes_of(convert.ticket_from_pb(pulled.ticket)) == a.bytes_of(ticket)
    assert pulled.num_pulled + pulled.num_found == 3 and not pulled.num_early_tokens
    b.claim_and_release(convert.ticket_from_pb(pulled.ticket))
    a.end(ticket)
    b.assert_idle()


def test_a_source_that_dies_or_freezes_ends_early_pulls_and_leaves_what_has_arrived(hosts: tuple[Host, Host]) -> None:
    _, b = hosts
    root = b.store.directory.parent
    for number, how in enumerate((signal.SIGKILL, signal.SIGSTOP)):
        a, name = Host(root / f"dying-{number}", 8), f"{number} dying"
        blocks, _ = a.fill(chain(name, 6))
        arrived = b.pull_early(a, a.hand_over([[blocks[:3]]]))
        ticket = a.hand_over([[blocks[3:]]])
        a.store.process.send_signal(how)
        call = b.begin_early(a, ticket)
        with pytest.raises(grpc.RpcError) as found:
            next(call)
        assert found.value.code() is grpc.StatusCode.UNAVAILABLE
        assert b.held.present(chain(name, 6)) == [True] * 3 + [False] * 3
        arrived.cancel()
        b.assert_idle()
        a.store.process.send_signal(signal.SIGCONT)
        a.stop()


def test_a_caller_that_is_gone_holds_nothing(hosts: tuple[Host, Host]) -> None:
    """The call may end at any moment: while the store asks for hashes, while it copies, and later."""
    a, b = hosts
    for pause_s in (0.0, 0.002, 0.005, 0.01, 0.1):
        blocks, _ = a.fill(chain(f"{pause_s} gone", 6))
        ticket = a.hand_over([[blocks]])
        call = b.begin_early(a, ticket)
        time.sleep(pause_s)
        call.cancel()
        a.end(ticket)
    for host in hosts:
        host.assert_idle()


def test_no_block_is_copied_twice_at_the_same_time(hosts: tuple[Host, Host]) -> None:
    """Whichever pull takes the blocks first copies them, and the other one waits."""
    a, b = hosts
    for name in "PQRSTUVW":
        blocks, _ = a.fill(chain(name, 6))
        a.held.share(blocks)
        early, ticket = a.hand_over([[blocks[:5]]]), a.hand_over([[blocks]])
        call = b.begin_early(a, early)
        pulled = b.pull(a, ticket)
        came_early = next(call).num_tokens
        assert pulled.num_pulled == 6 and pulled.num_early_tokens == came_early in (0, 80)
        call.cancel()
        b.claim_and_release(convert.ticket_from_pb(pulled.ticket))
        a.end(early)
        a.end(ticket)
    b.assert_idle()


async def test_who_waits_for_an_arrival_hears_of_a_source_that_is_gone() -> None:
    arrivals, ended, heard = Arrivals(), asyncio.Event(), list[str]()

    async def copy(source: str, hashes: list[bytes], error: Exception | None) -> None:
        try:
            with arrivals.arriving(source, hashes):
                await ended.wait()
                if error is not None:
                    raise error
        except (Aborted, Unavailable):
            pass

    async def wait(name: str, source: str, hashes: list[bytes]) -> None:
        try:
            await arrivals.wait(source, hashes)
            heard.append(name)
        except Unavailable:
            heard.append(f"{name} lost")

    gone = asyncio.create_task(copy("a", [b"1", b"2"], Unavailable("a is gone", retry_after_s=1.0)))
    refused = asyncio.create_task(copy("a", [b"3"], Aborted("wrong bytes")))
    await asyncio.sleep(0)
    with arrivals.arriving("a", [b"2"]):
        pass
    waits = [("same", "a", [b"2"]), ("other", "b", [b"2"]), ("refused", "a", [b"3"]), ("none", "a", [b"4"])]
    waiting = [asyncio.create_task(wait(*each)) for each in waits]
    impatient = asyncio.create_task(wait("impatient", "a", [b"1"]))
    await asyncio.sleep(0.01)
    assert heard == ["none"]
    impatient.cancel()
    await asyncio.sleep(0.01)
    assert heard == ["none"], "its end does not end the others' wait"
    ended.set()
    await asyncio.gather(gone, refused, *waiting)
    assert sorted(heard) == ["none", "other", "refused", "same lost"]
    await asyncio.wait_for(arrivals.wait("a", [b"1", b"2", b"3"]), 1.0)
