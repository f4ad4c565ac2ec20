"""Blocks on disk: the contents of a file after crashes, and the restoration of blocks into a new arena."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import xxhash

from block_store.disk.block_file import BlockFile
from block_store.disk.restore import Prefix, restore
from block_store.errors import DiskTierError
from block_store.ledger.prefix_hash import group_hash
from block_store.redis.redis_server import RedisHandle
from common.types import KvLayout, KvSpec
from protos.v1 import block_store_pb2 as pb
from testing.ledger.hosts import Host
from testing.ledger.store import LAYOUT, TestStore, chain, wait_until
from testing.ledger.store import content as block_content
from testing.system import wait_for

MakeHost = Callable[..., Host]
BLOCK_BYTES = 8192
RECORD_BYTES = 64
WINDOWED = KvLayout(
    16,
    (
        KvSpec(num_layers=1, num_kv_heads=1, head_dim=8, dtype="bfloat16"),
        KvSpec(num_layers=1, num_kv_heads=1, head_dim=8, dtype="bfloat16", window=32),
    ),
)


def open_file(directory: Path, num_slots: int = 8) -> BlockFile:
    return BlockFile(directory, BLOCK_BYTES, num_slots * (BLOCK_BYTES + RECORD_BYTES))


def content(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, BLOCK_BYTES, np.uint8)


def name(number: int) -> bytes:
    return number.to_bytes(32, "little")


def put(file: BlockFile, number: int) -> None:
    data = content(number)
    assert file.store(name(number), xxhash.xxh3_64_intdigest(data.data), data.data, lambda: True)


def got(file: BlockFile, number: int) -> bool:
    """Reads a block. Returns whether it was found, and checks its bytes."""
    row = np.empty(BLOCK_BYTES, np.uint8)
    digest = file.read_into(name(number), row)
    assert digest is None or ((row == content(number)).all() and digest == xxhash.xxh3_64_intdigest(row.data))
    return digest is not None


def test_blocks_survive_the_process_and_the_least_recently_used_is_replaced(tmp_path: Path) -> None:
    file = open_file(tmp_path, 4)
    for number in range(1, 5):
        put(file, number)
    assert got(file, 1)
    put(file, 5)  # replaces 2, because 1 has been read more recently
    assert [number for number in range(1, 6) if got(file, number)] == [1, 3, 4, 5]
    file.close()

    file = open_file(tmp_path, 4)
    assert [number for number in range(1, 6) if got(file, number)] == [1, 3, 4, 5]
    file.close()
    smaller = open_file(tmp_path, 2)
    assert len(smaller) == 2 and sum(got(smaller, number) for number in range(1, 6)) == 2
    put(smaller, 6)
    assert len(smaller) == 2 and got(smaller, 6)
    smaller.close()


def test_a_block_that_changes_while_it_is_copied_is_not_kept(tmp_path: Path) -> None:
    file, data = open_file(tmp_path, 1), content(1)
    assert not file.store(name(1), xxhash.xxh3_64_intdigest(data.data), data.data, lambda: False)
    assert not got(file, 1)
    put(file, 2)
    file.close()
    assert got(open_file(tmp_path, 1), 2)


@pytest.mark.parametrize("damage", ["blocks", "index", "cut"])
def test_damaged_blocks_count_as_missing(tmp_path: Path, damage: str) -> None:
    file = open_file(tmp_path)
    put(file, 1)
    put(file, 2)
    file.close()
    if damage == "cut":  # a file system that lost the end of the file
        os.truncate(tmp_path / "blocks", BLOCK_BYTES // 2)
    else:
        with open(tmp_path / damage, "r+b") as stream:
            stream.seek(20)
            stream.write(b"\xff")
    file = open_file(tmp_path)
    assert sum(got(file, number) for number in (1, 2)) == (0 if damage == "cut" else 1)
    assert len(file) == (0 if damage == "cut" else 1), "what is damaged is forgotten, and its slot is free"
    file.close()


def test_a_file_has_one_user_and_room_for_a_block(tmp_path: Path) -> None:
    file = open_file(tmp_path)
    with pytest.raises(DiskTierError, match="in use by another block store"):
        open_file(tmp_path)
    file.close()
    with pytest.raises(DiskTierError, match="less than one block of 8192 bytes"):
        BlockFile(tmp_path, BLOCK_BYTES, BLOCK_BYTES)
    (tmp_path / "file").touch()
    with pytest.raises(DiskTierError, match="Not a directory"):
        open_file(tmp_path / "file" / "below")


def test_files_that_could_not_be_opened_can_be_opened_later(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 * BLOCK_BYTES - 1, hard))  # the index fits
    try:
        with pytest.raises(DiskTierError, match="File too large"):
            open_file(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    open_file(tmp_path).close()


def slots_in_memory(file: BlockFile) -> set[int]:
    """Returns the slots whose first page is in the kernel's page cache (`mincore`)."""
    with mmap.mmap(file._blocks, file.num_slots * BLOCK_BYTES) as mapping:
        view = (ctypes.c_ubyte * len(mapping)).from_buffer(mapping)
        pages = (ctypes.c_ubyte * (len(mapping) // mmap.PAGESIZE))()
        assert ctypes.CDLL(None).mincore(view, ctypes.c_size_t(len(mapping)), pages) == 0
        del view
    return {slot for slot in range(file.num_slots) if pages[slot * BLOCK_BYTES // mmap.PAGESIZE] & 1}


def test_blocks_are_read_ahead_from_the_disk(tmp_path: Path) -> None:
    file = open_file(tmp_path, 512)
    for number in range(512):
        put(file, number)
    os.fsync(file._blocks)
    os.posix_fadvise(file._blocks, 0, 0, os.POSIX_FADV_DONTNEED)
    if slots_in_memory(file):
        pytest.skip("this file system does not drop pages on request")
    wanted = {*range(30), 500, 501}
    file.read_ahead([name(number) for number in (*wanted, 999)])
    wait_until(lambda: wanted <= slots_in_memory(file))
    assert 250 not in slots_in_memory(file), "nobody asked for it"
    assert all(got(file, number) for number in (*wanted, 250))
    file.close()


class Recorded(BlockFile):
    """A file that records which blocks are requested from the disk in advance, and which are read."""

    def __init__(self, directory: Path, block_bytes: int) -> None:
        super().__init__(directory, block_bytes, 1 << 20)
        self.calls: list[tuple[str, list[bytes]]] = []

    def read_ahead(self, hashes: Iterable[bytes]) -> None:
        self.calls.append(("ahead", list(hashes)))
        super().read_ahead(hashes)

    def read_into(self, prefix_hash: bytes, row: np.ndarray) -> int | None:
        self.calls.append(("read", [prefix_hash]))
        return super().read_into(prefix_hash, row)


def test_a_restore_requests_all_missing_blocks_before_it_waits_for_the_first(store: TestStore, tmp_path: Path) -> None:
    hashes, held = chain("kept", 6), store.held()
    file = Recorded(tmp_path, store.arena.block_bytes)
    digests = {one: xxhash.xxh3_64_intdigest(block_content(one).data) for one in hashes}
    for one in hashes:
        file.store(one, digests[one], block_content(one).data, lambda: True)
    caller = store.caller()
    present = store.fill(caller, hashes[:2])
    assert restore(held, file, Prefix(hashes)) == 4
    assert file.calls == [("ahead", hashes[2:]), *(("read", [one]) for one in hashes[2:])]
    [refs] = held.acquire([hashes])
    assert refs[:2] == present and [store.arena.read(ref.block) for ref in refs] == [
        block_content(one).tobytes() for one in hashes
    ]
    assert [int(store.arena.digests[ref.block]) for ref in refs] == [digests[one] for one in hashes]
    held.close()
    file.close()


def _store_forever(directory: Path, seed: int) -> None:
    draw, file = random.Random(seed), open_file(directory)
    while True:
        put(file, draw.randrange(1, 33))


def test_a_kill_at_any_point_never_leaves_a_wrong_block(tmp_path: Path) -> None:
    """Kills a process that stores blocks, at 100 random moments. `got` checks the bytes of each block that is found."""
    draw, fork, num_found = random.Random(7), multiprocessing.get_context("fork"), 0
    for round_ in range(100):
        process = fork.Process(target=_store_forever, args=(tmp_path, round_))
        process.start()
        time.sleep(draw.uniform(0.0, 0.02))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        file = open_file(tmp_path)
        num_found += sum(got(file, number) for number in range(1, 33))
        file.close()
    assert num_found > 100


# --- with a store


@pytest.fixture
def kv_dir(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def make_host(kv_dir: Path) -> Iterator[MakeHost]:
    """Returns a function that starts stores, which share a directory on disk. They end with the test."""
    hosts: list[Host] = []

    def make(num_blocks: int = 24, layout: KvLayout = LAYOUT, redis_url: str | None = None) -> Host:
        where = Path("/dev/shm") / f"ll-{os.getpid()}-{kv_dir.parent.name}-{len(hosts)}"
        flags = ["--kv-disk", "1MiB", "--kv-disk-dir", str(kv_dir)]
        flags += [] if redis_url is None else ["--redis-url", redis_url]
        hosts.append(Host(where, num_blocks, *flags, layout=layout))
        return hosts[-1]

    yield make
    for host in hosts:
        if host.store.process.poll() is None:
            host.stop()


@pytest.fixture
def stored(make_host: MakeHost) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """The hashes and bytes of a prefix of six blocks that an ended store has left on disk."""
    host = make_host()
    hashes = chain("kept", 6)
    refs, _ = host.fill(hashes, partial=True)
    content = [host.arena.read(ref.block) for ref in refs]
    host.held.release_many([refs])
    host.stop()
    yield hashes, content


def restored(host: Host, hashes: list[bytes], **fields: Any) -> int:
    response: pb.RestoreResponse = host.stub.Restore(pb.RestoreRequest(prefix_hashes=hashes, **fields), timeout=60)
    return int(response.num_blocks)


def on_disk(host: Host) -> pb.DiskTierInfo:
    info: pb.DiskTierInfo = host.store.inspect().disk_tier
    return info


def test_a_new_arena_finds_what_an_earlier_one_sealed(
    make_host: MakeHost, stored: tuple[list[bytes], list[bytes]]
) -> None:
    hashes, content = stored
    host = make_host()
    assert on_disk(host).num_blocks == 6, "all full blocks, and not the partial one"
    assert restored(host, chain("other", 3)) == 0
    assert restored(host, [*hashes, *chain("unknown", 2)]) == 6
    assert restored(host, hashes) == 0, "now they are in the arena"
    [refs] = host.held.acquire([hashes])
    assert [host.arena.read(ref.block) for ref in refs] == content
    host.held.release(refs)
    host.assert_idle()
    assert (on_disk(host).num_restored, on_disk(host).num_stored) == (6, 0), "they are on disk already"
    host.stop()


def test_no_thread_of_the_store_has_a_lower_priority(make_host: MakeHost) -> None:
    """The interpreter's lock makes threads wait for each other, so one of a lower priority would delay restores."""
    host = make_host()
    found: list[int] = []
    for task in os.listdir(f"/proc/{host.store.process.pid}/task"):
        with suppress(ProcessLookupError):  # the thread has ended
            found.append(os.getpriority(os.PRIO_PROCESS, int(task)))
    assert len(found) > 2 and set(found) == {os.getpriority(os.PRIO_PROCESS, 0)}
    host.stop()


def test_a_damaged_block_ends_the_prefix(
    make_host: MakeHost, kv_dir: Path, stored: tuple[list[bytes], list[bytes]]
) -> None:
    hashes, content = stored
    [blocks] = kv_dir.glob("*/blocks")
    whole = blocks.read_bytes()
    at = whole.index(content[3])
    blocks.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    host = make_host()
    assert restored(host, hashes) == 3
    [refs] = host.held.acquire([hashes])
    assert [host.arena.read(ref.block) for ref in refs] == content[:3]
    host.held.release(refs)
    host.assert_idle()
    refs, _ = host.fill(hashes[3:4])  # computed again, and stored again
    wait_until(lambda: on_disk(host).num_stored == 1)
    host.stop()


def test_nothing_is_restored_without_room_and_nothing_is_held(
    make_host: MakeHost, stored: tuple[list[bytes], list[bytes]]
) -> None:
    hashes, _ = stored
    host = make_host(num_blocks=8)
    in_use = host.held.alloc(4)
    assert restored(host, hashes) == 0
    host.held.release(in_use)
    assert restored(host, hashes) == 6
    host.assert_idle()
    host.stop()


def test_restores_continue_after_redis_has_lost_everything(
    make_host: MakeHost, stored: tuple[list[bytes], list[bytes]], redis_handle: RedisHandle
) -> None:
    hashes, content = stored
    host = make_host(redis_url=redis_handle.url)
    assert restored(host, hashes[:2]) == 2
    redis_handle.client.flushall()
    wait_until(lambda: restored(host, hashes) == 4)  # the others are in the arena's header
    refs = wait_for(lambda: host.held.acquire([hashes])[0], bool, 60, "the worker has not rejoined")
    assert [host.arena.read(ref.block) for ref in refs] == content
    host.held.release(refs)
    host.assert_idle()
    host.stop()


def test_without_redis_nothing_is_restored_and_no_prompt_waits_for_it(
    make_host: MakeHost, stored: tuple[list[bytes], list[bytes]], redis_handle: RedisHandle
) -> None:
    hashes, _ = stored
    host = make_host(redis_url=redis_handle.url)
    assert restored(host, hashes[:1]) == 1
    assert redis_handle.process is not None
    redis_handle.process.send_signal(signal.SIGSTOP)
    try:
        answers = [restored(host, hashes) for _ in range(3)]  # each within the call's deadline
        time.sleep(6)  # the holder's lease ends, so it must register again
    finally:
        redis_handle.process.send_signal(signal.SIGCONT)
    assert answers == [0, 0, 0]
    wait_until(lambda: restored(host, hashes) == 5)
    host.assert_idle()
    host.stop()


def test_a_window_needs_only_its_last_blocks(make_host: MakeHost) -> None:
    hashes = chain("windowed", 6)
    windows = [group_hash(one, 1) for one in hashes]
    host = make_host(layout=WINDOWED)
    for names in (hashes, windows):
        refs, _ = host.fill(names)
        host.held.release(refs)
    host.stop()
    host = make_host(layout=WINDOWED)
    assert restored(host, hashes) == 6 + 2
    assert host.held.present([*hashes, *windows]) == [True] * 6 + [False] * 4 + [True] * 2
    host.stop()


def test_a_store_without_a_disk_tier_says_so() -> None:
    host = Host(Path("/dev/shm") / f"ll-{os.getpid()}-none", 8)
    with pytest.raises(grpc.RpcError) as found:
        restored(host, chain("kept", 1))
    assert found.value.code() is grpc.StatusCode.FAILED_PRECONDITION and "--kv-disk" in found.value.details()
    assert not host.store.inspect().HasField("disk_tier")
    host.stop()


def test_wrong_hashes_are_refused(make_host: MakeHost) -> None:
    host = make_host()
    with pytest.raises(grpc.RpcError) as found:
        restored(host, [b"short"])
    assert found.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    host.stop()
