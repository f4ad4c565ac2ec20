"""Copies of blocks between two real stores, each with its own Redis."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import pytest

from common import convert
from common.ticket import Ticket
from common.types import BlockRef
from testing.ledger.hosts import Host
from testing.ledger.store import LAYOUT, chain, wait_until

NUM_BLOCKS = 24


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    with TemporaryDirectory(dir="/dev/shm", prefix="ll-pull-") as root:  # test runs of one machine share /dev/shm
        pair = Host(Path(root) / "a", NUM_BLOCKS), Host(Path(root) / "b", NUM_BLOCKS, "--pull-blocks")
        yield pair
        for host in pair:
            host.stop()


def test_a_pull_copies_blocks_and_a_second_one_finds_them(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    prompt, tail = a.fill(chain("prompt", 4), partial=True)
    ticket = a.hand_over([[prompt + tail], [prompt]])
    first = b.pull(a, ticket)
    assert (first.num_pulled, first.num_found, first.num_bytes) == (5, 0, 5 * LAYOUT.block_bytes)
    copies = convert.ticket_from_pb(first.ticket)
    assert copies.num_tokens == ticket.num_tokens and copies.arena_id == b.arena.arena_id
    assert b.bytes_of(copies) == a.bytes_of(ticket), "both branches, the partial block included"
    assert copies.tables[1][0] == copies.tables[0][0][:4], "what branches share is copied once"
    b.claim_and_release(copies)

    second = b.pull(a, ticket)
    assert (second.num_pulled, second.num_found) == (1, 4), "full blocks are cached; a partial one has no name"
    b.claim_and_release(convert.ticket_from_pb(second.ticket))
    a.end(ticket)
    for host in hosts:
        host.assert_idle()


def test_what_the_source_does_not_give_is_refused(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    blocks, _ = a.fill(chain("refused", 2))
    ticket = a.hand_over([[blocks]])
    forged = Ticket(ticket.arena_id, ticket.id, (((*blocks, BlockRef(23, 1)),),), (48,))
    wrong_secret = Ticket(ticket.arena_id, type(ticket.id)(ticket.id.epoch, bytes(16)), ticket.tables, (32,))
    for bad in (forged, wrong_secret, Ticket("elsewhere", ticket.id, ticket.tables, (32,))):
        assert refusal(b, a, bad) is grpc.StatusCode.ABORTED
    with pytest.raises(grpc.RpcError) as found:
        a.pull(b, ticket)
    assert found.value.code() is grpc.StatusCode.FAILED_PRECONDITION and "--pull-blocks" in found.value.details()
    a.end(ticket)
    assert refusal(b, a, ticket) is grpc.StatusCode.ABORTED
    b.assert_idle()


def test_changed_bytes_are_found_by_their_digest(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    blocks, _ = a.fill(chain("changed", 3))
    ticket = a.hand_over([[blocks]])
    a.arena.data[blocks[1].block, 5] ^= 1  # after the seal, as a faulty network would
    assert refusal(b, a, ticket) is grpc.StatusCode.ABORTED
    a.arena.data[blocks[1].block, 5] ^= 1
    b.claim_and_release(convert.ticket_from_pb(b.pull(a, ticket).ticket))
    a.end(ticket)
    b.assert_idle()


def test_a_pull_waits_for_room_and_holds_nothing_meanwhile(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    blocks, _ = a.fill(chain("waiting", 6))
    ticket = a.hand_over([[blocks]])
    taken = b.held.alloc(NUM_BLOCKS - 2)
    call = b.stub.Pull.future(b.request(a, ticket), timeout=60)
    time.sleep(0.3)
    assert not call.done() and b.held.num_held == NUM_BLOCKS - 2 == b.store.inspect().reserved
    b.held.release(taken)
    b.claim_and_release(convert.ticket_from_pb(call.result().ticket))

    taken = b.held.alloc(NUM_BLOCKS - 2)
    call = b.stub.Pull.future(b.request(a, ticket), timeout=60)
    time.sleep(0.1)
    call.cancel()
    b.held.release(taken)
    b.assert_idle()
    a.end(ticket)


def test_the_sources_ticket_lives_while_it_is_read(hosts: tuple[Host, Host]) -> None:
    """The ticket of a frozen reader ends with its lease. A ticket whose blocks are being pulled does not end."""
    a, b = hosts
    blocks, _ = a.fill(chain("kept", 2))
    ticket = a.hand_over([[blocks]])
    taken = b.held.alloc(NUM_BLOCKS)
    call = b.stub.Pull.future(b.request(a, ticket), timeout=60)
    time.sleep(1.0)
    before = a.lease_ms(ticket)
    wait_until(lambda: a.lease_ms(ticket) > before)
    b.held.release(taken)
    b.claim_and_release(convert.ticket_from_pb(call.result().ticket))
    a.end(ticket)


def test_a_source_that_dies_or_freezes_ends_the_pull_and_leaves_nothing(hosts: tuple[Host, Host]) -> None:
    _, b = hosts
    root = b.store.directory.parent
    for number, how in enumerate((signal.SIGKILL, signal.SIGSTOP)):
        a = Host(root / f"dying-{number}", 4)
        blocks, _ = a.fill(chain(f"dying-{number}", 4))
        ticket = a.hand_over([[blocks]])
        a.store.process.send_signal(how)
        assert refusal(b, a, ticket) is grpc.StatusCode.UNAVAILABLE
        b.assert_idle()
        a.store.process.send_signal(signal.SIGCONT)
        a.stop()


def test_a_pull_that_waits_for_room_notices_that_its_source_is_gone(hosts: tuple[Host, Host]) -> None:
    _, b = hosts
    a = Host(b.store.directory.parent / "gone", 4)
    blocks, _ = a.fill(chain("gone", 2))
    ticket = a.hand_over([[blocks]])
    taken = b.held.alloc(NUM_BLOCKS)
    call = b.stub.Pull.future(b.request(a, ticket), timeout=60)
    time.sleep(0.3)
    a.store.process.kill()
    assert call.code() is grpc.StatusCode.UNAVAILABLE and b.held.num_held == NUM_BLOCKS
    b.held.release(taken)
    b.assert_idle()
    a.stop()


def test_many_pulls_at_once_copy_what_their_tickets_name(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    tickets = []
    for name in ("u", "v", "w"):
        blocks, tail = a.fill(chain(name, 5), partial=True)
        tickets.append(a.hand_over([[blocks + tail]]))
    wrong: list[Any] = []

    def work(ticket: Ticket) -> None:
        for _ in range(8):
            copies = convert.ticket_from_pb(b.pull(a, ticket).ticket)
            if b.bytes_of(copies) != a.bytes_of(ticket):
                wrong.append(copies)
            b.claim_and_release(copies)

    threads = [threading.Thread(target=work, args=(ticket,)) for ticket in tickets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    assert not wrong and not any(thread.is_alive() for thread in threads)
    for ticket in tickets:
        a.end(ticket)
    b.assert_idle()


def test_pulls_go_on_after_their_holder_could_not_register(hosts: tuple[Host, Host]) -> None:
    a, _ = hosts
    blocks, _ = a.fill(chain("registered", 2))
    ticket = a.hand_over([[blocks]])
    b = Host(a.store.directory.parent / "later", 4, "--pull-blocks")
    slots = b.store.directory / "writers"
    slots.rename(slots.with_name("away"))
    slots.touch()
    assert refusal(b, a, ticket) is grpc.StatusCode.UNAVAILABLE
    slots.unlink()
    slots.with_name("away").rename(slots)
    b.claim_and_release(convert.ticket_from_pb(b.pull(a, ticket).ticket))
    a.end(ticket)
    b.stop()


def refusal(b: Host, a: Host, ticket: Ticket) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as found:
        b.stub.Pull(b.request(a, ticket), timeout=60)
    return found.value.code()
