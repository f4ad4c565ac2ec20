"""The block store's process, called over gRPC."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from block_store.arena.arena import Arena
from block_store.arena.header import arena_bytes
from block_store.errors import Stale
from block_store.holder.held_blocks import HeldBlocks
from block_store.ledger.client import LedgerClient
from block_store.ledger.codec import SealItem
from block_store.ledger.lane import Attempt
from block_store.ledger.scripts import LedgerScripts
from block_store.redis.redis_server import CALL_TIMEOUT_S, open_client
from block_store.redis.registry import WorkerRegistry
from block_store.transfer.block_source import BlockSource
from block_store.transfer.known_tickets import KnownTickets
from common import convert
from common.ticket import TicketId
from common.types import BlockRef, KvLayout, KvSpec
from protos.v1 import block_store_pb2 as pb
from protos.v1 import types_pb2
from testing.chaos.redis_process import RedisProcess
from testing.ledger.store import LAYOUT, StoreProcess, chain, wait_until
from testing.system import check_health

OTHER_LAYOUT = KvLayout(16, (KvSpec(2, 1, 8, "int8"),))


@pytest.fixture
def running(shm: Path) -> Iterator[StoreProcess]:
    store = StoreProcess(shm / "s", "--memory-budget", str(64 << 20), "--reserve-bytes", "0")
    yield store
    store.stop()


def attach_both(store: StoreProcess) -> pb.AttachResponse:
    """Attaches prefill, which waits, and then decode. Returns the reply."""
    replies: list[pb.AttachResponse] = []

    def first() -> None:
        replies.append(store.attach("p"))

    thread = threading.Thread(target=first)
    thread.start()
    time.sleep(0.3)
    assert not replies and store.inspect().arena_id == ""
    reply = store.attach("d", "decode", floor=4)
    thread.join()
    assert reply.floor_blocks == 4 + (reply.num_blocks - 2 * 4) // 4 and replies[0].floor_blocks == 0
    replies[0].floor_blocks = reply.floor_blocks
    assert replies[0] == reply, "but for the floor they are the same"
    return reply


def held_by(reply: pb.AttachResponse, name: str) -> HeldBlocks:
    arena = Arena.open(reply.directory, LAYOUT.fingerprint)
    slot = arena.acquire_writer_slot()
    ledger = LedgerScripts.attach(open_client(reply.redis_url, arena.fixed.run_id, 60.0), arena)
    return HeldBlocks(LedgerClient.register(ledger, name, writer_slot=slot.number), arena, slot)


def assert_uneven_tables_are_refused(running: StoreProcess, arena_id: str, ticket: TicketId, ref: BlockRef) -> None:
    table = types_pb2.BlockTable(blocks=[ref.block, ref.block], generations=[ref.generation])
    asked: dict[str, Any] = {"table": table, "ticket_epoch": ticket.epoch, "ticket_secret": ticket.secret}
    for call in (
        lambda: list(running.stub.ReadBlocks(pb.ReadBlocksRequest(arena_id=arena_id, **asked), timeout=60)),
        lambda: running.stub.KeepTicket(pb.KeepTicketRequest(arena_id=arena_id, **asked), timeout=60),
    ):
        with pytest.raises(grpc.RpcError) as refusal:
            call()
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert refusal.value.details() == "generations must have one entry for each of the 2 blocks, got 1"


def test_workers_attach_share_and_are_seen(running: StoreProcess) -> None:
    assert asyncio.run(check_health(running.address, service="looseleaf.v1.BlockStoreService"))
    reply = attach_both(running)
    assert reply.block_bytes == LAYOUT.block_bytes
    assert 56 << 20 < arena_bytes(reply.num_blocks, reply.block_bytes) <= 60 << 20, "64 MiB - 2 x 2 MiB"
    with pytest.raises(grpc.RpcError) as refusal:
        running.attach("x", layout=OTHER_LAYOUT)
    assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "different KV layout (16 tokens, int8, 768 bytes a block) from the" in refusal.value.details()
    assert f"({LAYOUT.summary})" in refusal.value.details()
    with pytest.raises(grpc.RpcError) as refusal:
        running.attach("x", floor=10**6)
    assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert running.attach("late", "decode", floor=4) == reply

    held = held_by(reply, "worker")
    refs = held.alloc(3)
    for ref in refs:
        held.arena.data[ref.block] = ref.block + 1
    held.seal([SealItem(ref, h) for ref, h in zip(refs[:2], chain("a", 2), strict=False)])
    seen = running.inspect(blocks=True)
    assert (seen.sealed, seen.reserved, seen.free) == (2, 1, reply.num_blocks - 3)
    assert [holder.name for holder in seen.holders] == ["worker"] and seen.holders[0].num_references == 3
    assert seen.blocks[refs[0].block].prefix_hash == chain("a", 1)[0]
    assert list(seen.blocks[refs[0].block].holders) == [held.epoch]

    source = BlockSource(held.arena, held.holder.ledger, KnownTickets())
    for ref in (refs[2], BlockRef(refs[0].block, 1)):
        with pytest.raises(Stale):
            source.read(0, [ref])
    held.share(refs[:1])
    ticket = held.hand_over([[refs[:1]]])
    [read] = running.read(reply.arena_id, ticket, refs[:1])
    assert read.data == held.arena.data[refs[0].block].tobytes()
    assert list(read.digests) == [held.arena.digest(refs[0].block)]
    guessed, own = replace(ticket, secret=bytes(16)), TicketId(held.epoch, b"")
    for arena_id, shown, refs_asked, code in (
        ("x", ticket, refs[:1], grpc.StatusCode.NOT_FOUND),
        (reply.arena_id, ticket, refs[1:2], grpc.StatusCode.PERMISSION_DENIED),
        (reply.arena_id, ticket, refs[:2], grpc.StatusCode.PERMISSION_DENIED),
        (reply.arena_id, ticket, [BlockRef(refs[0].block, 1)], grpc.StatusCode.PERMISSION_DENIED),
        (reply.arena_id, ticket, [BlockRef(10**9, 1)], grpc.StatusCode.PERMISSION_DENIED),
        (reply.arena_id, guessed, refs[:1], grpc.StatusCode.ABORTED),
        (reply.arena_id, own, refs[:1], grpc.StatusCode.ABORTED),
    ):
        with pytest.raises(grpc.RpcError) as refusal:
            running.read(arena_id, shown, refs_asked)
        assert refusal.value.code() is code
    assert_uneven_tables_are_refused(running, reply.arena_id, ticket, refs[0])
    held.holder.claim(ticket, Attempt())
    with pytest.raises(grpc.RpcError) as refusal:
        running.read(reply.arena_id, ticket, refs[:1])
    assert refusal.value.code() is grpc.StatusCode.ABORTED, "the ticket is over"

    record = WorkerRegistry(open_client(reply.redis_url)).get_store(reply.arena_id, fresh_s=60.0)
    assert record is not None and record.address == running.address and record.num_blocks == reply.num_blocks
    held.close()
    log = running.stop()
    assert running.process.returncode == 0 and not running.directory.exists(), log
    assert "maximum concurrency at 64 tokens" in log and "private redis-server" in log


def test_the_store_reaps_who_falls_silent(shm: Path) -> None:
    store = StoreProcess(shm / "s", "--num-blocks", "8", "--expect-workers", "1")
    reply = store.attach("w")
    held = held_by(reply, "w")
    held.holder.lease._stop.set()
    held.alloc(2)
    held.holder.ledger.beat(held.epoch, 0.0)
    held.holder.ledger.client.zadd(held.holder.ledger.tag + "leases", {str(held.epoch): 1})
    wait_until(lambda: store.inspect().quarantine == 2 and not store.inspect().holders)
    time.sleep(0.7)
    assert store.inspect().quarantine == 2, "its process lives"
    held.writer_slot.close()
    wait_until(lambda: store.inspect().free == 8)
    store.stop()


def test_attachments_that_cannot_work_are_refused(shm: Path) -> None:
    store = StoreProcess(shm / "s", "--num-blocks", "8", "--expect-workers", "1", "--attach-timeout-s", "0.5")
    for request in (
        pb.AttachRequest(layout=convert.layout_to_pb(LAYOUT)), pb.AttachRequest(worker_id="w"),
        pb.AttachRequest(worker_id="w", layout=convert.layout_to_pb(KvLayout(0, LAYOUT.groups))),
    ):  # fmt: skip
        with pytest.raises(grpc.RpcError) as refusal:
            store.stub.Attach(request, timeout=60)
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT, refusal.value
    with pytest.raises(grpc.RpcError) as refusal:
        store.attach("w", floor=9)
    assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "8 blocks but the workers need at least 9" in refusal.value.details()
    assert store.attach("w", floor=8).num_blocks == 8, "after a refusal the next may try"
    store.stop()
    slow = StoreProcess(shm / "t", "--num-blocks", "8", "--attach-timeout-s", "0.3")
    with pytest.raises(grpc.RpcError) as refusal:
        slow.attach("alone")
    assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE and "1 of 2 expected" in refusal.value.details()
    slow.stop()


def test_workers_with_the_same_id_count_once_and_are_told(shm: Path) -> None:
    store = StoreProcess(shm / "s", "--num-blocks", "8", "--attach-timeout-s", "2")
    with ThreadPoolExecutor(2) as pool:
        for call in [pool.submit(store.attach, "w", role) for role in ("prefill", "decode")]:
            with pytest.raises(grpc.RpcError) as refusal:
                call.result(60)
            expected = "1 of 2 expected workers attached within 2 s; several have the worker_id w"
            assert refusal.value.details() == expected
    store.stop()


def test_a_worker_that_attaches_again_outlives_its_earlier_call(shm: Path) -> None:
    store = StoreProcess(shm / "s", "--num-blocks", "8")
    request = pb.AttachRequest(worker_id="w", role="prefill", layout=convert.layout_to_pb(LAYOUT), max_model_len=64)
    calls = []
    for _ in range(2):
        calls.append(store.stub.Attach.future(request, timeout=60))
        time.sleep(0.3)
    earlier, later = calls
    earlier.cancel()
    time.sleep(0.3)
    assert store.attach("other", "decode").num_blocks == 8 == later.result().num_blocks
    store.stop()


def test_an_arena_whose_ledger_cannot_be_opened_can_be_created_later(shm: Path, tmp_path: Path) -> None:
    """The first attempt ends after `PATIENCE_S`, and removes the arena's file."""
    redis = RedisProcess(tmp_path)
    store = StoreProcess(shm / "s", "--num-blocks", "8", "--expect-workers", "1", "--redis-url", redis.url)
    redis.freeze()
    with pytest.raises(grpc.RpcError, match="does not answer"):
        store.attach("w")
    redis.thaw()
    assert store.attach("w").num_blocks == 8
    store.stop()
    redis.close()


def test_a_store_that_ends_while_it_creates_an_arena_leaves_none(shm: Path, tmp_path: Path) -> None:
    redis = RedisProcess(tmp_path)
    store = StoreProcess(shm / "s", "--num-blocks", "8", "--expect-workers", "1", "--redis-url", redis.url)
    with ThreadPoolExecutor(1) as pool:
        redis.freeze()
        call = pool.submit(store.attach, "w")
        wait_until((shm / "s" / "arena").exists)
        store.process.terminate()
        with pytest.raises(grpc.RpcError):
            call.result(60)
        redis.thaw()
    log = store.stop()
    assert not (shm / "s").exists(), log
    redis.close()


def test_a_worker_attaches_although_redis_pauses(shm: Path, tmp_path: Path) -> None:
    redis = RedisProcess(tmp_path)
    store = StoreProcess(shm / "s", "--num-blocks", "8", "--expect-workers", "1", "--redis-url", redis.url)
    with ThreadPoolExecutor(1) as pool:
        redis.freeze()
        call = pool.submit(store.attach, "w")
        time.sleep(2 * CALL_TIMEOUT_S)
        assert not call.done()
        redis.thaw()
        assert call.result(60).num_blocks == 8
    store.stop()
    redis.close()


def test_a_kept_arena_is_mapped_again(shm: Path) -> None:
    flags = ("--num-blocks", "8", "--expect-workers", "1", "--keep-arena")
    store = StoreProcess(shm / "s", *flags)
    first = store.attach("w")
    store.stop()
    assert os.listdir(shm / "s") == ["arena"]
    again = StoreProcess(shm / "s", *flags)
    second = again.attach("w")
    assert second.arena_id == first.arena_id and Arena.open(second.directory).fixed.rebuild_count == 2
    with pytest.raises(grpc.RpcError) as refusal:
        again.attach("w", layout=OTHER_LAYOUT)
    assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    other = subprocess.run(
        [sys.executable, "-m", "block_store", "--directory", str(shm / "s"), "--port", "0"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert other.returncode == 1 and "belongs to another block store" in other.stderr
    again.stop()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--redis-url", "redis://127.0.0.1:1"), "redis at redis://127.0.0.1:1 does not answer"),
        (("--directory", "/proc/nowhere"), "--directory /proc/nowhere"),
        (("--num-blocks", "0"), "--num-blocks"),
    ],
)
def test_a_store_that_cannot_start_says_why(shm: Path, flags: tuple[str, ...], sentence: str) -> None:
    command = [sys.executable, "-m", "block_store", "--directory", str(shm / "s"), "--port", "0", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode in (1, 2) and sentence in done.stderr and "Traceback" not in done.stderr
