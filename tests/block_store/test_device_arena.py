"""Arenas in device memory. This process is the store and other processes are workers, or vice versa."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import cast

import pytest

from block_store.arena.arena import Arena
from block_store.arena.cuda import Cuda
from block_store.arena.device_memory import DeviceBlocks
from block_store.arena.header import Memory
from block_store.arena.placement import NoDeviceMemory, create_on_device, has_live_memory, open_blocks
from block_store.errors import ArenaBusy, ArenaError, ArenaLost, HeaderAheadError, HeaderMismatch
from block_store.ledger.scripts import LedgerScripts
from block_store.server.sources import as_statuses
from block_store.transfer import frames
from block_store.transfer.block_source import BlockSource
from block_store.transfer.known_tickets import KnownTickets
from common.errors import Unavailable
from common.types import BlockRef
from testing.ledger.store import LAYOUT, line, python, view

WORKER = """if True:
    import sys
    from block_store.arena.arena import Arena
    from block_store.arena.cuda import Cuda
    from block_store.arena.placement import open_blocks
    from testing.ledger.store import view
    from common.types import BlockRef
    arena = Arena.open(sys.argv[1])
    open_blocks(arena, Cuda(sys.argv[2]))
    data = view(arena.data)
"""
STORE = """if True:
    import pathlib, sys
    from block_store.arena.cuda import Cuda
    from block_store.arena.placement import create_on_device
    from testing.ledger.store import LAYOUT, view
    arena = create_on_device(pathlib.Path(sys.argv[1]), LAYOUT, 6, Cuda(sys.argv[2]).device(0), "store")
    view(arena.data)[5] = 55
    print("ready", flush=True); sys.stdin.readline()
"""


def test_store_and_workers_see_the_same_bytes_and_a_killed_worker_loses_none(
    shm: Path, gpus: Cuda, cuda_library: str
) -> None:
    arena = create_on_device(shm, LAYOUT, 6, gpus.device(0), "auto")
    assert os.path.getsize(shm / "arena") < 4 << 20 and arena.data.shape == (6, LAYOUT.block_bytes)
    assert arena.read(3) == bytes(LAYOUT.block_bytes), "nobody sees what others left in device memory"
    code = WORKER + "    data[3] = 33; print('written', flush=True); sys.stdin.readline()"
    worker = python(code, str(shm), cuda_library)
    assert line(worker) == "written"
    worker.kill()
    worker.communicate(timeout=60)
    assert arena.read(3) == bytes([33]) * LAYOUT.block_bytes and has_live_memory(arena)
    arena.data.write(2, bytes([22]) * LAYOUT.block_bytes)
    successor = python(WORKER + "    print(data[:, 0].tolist(), flush=True)", str(shm), cuda_library)
    assert line(successor) == "[0, 0, 22, 33, 0, 0]"
    successor.communicate(timeout=60)
    arena.data.close()
    assert gpus.device(0).memory_info().free == 64 << 20


def test_the_header_is_read_without_cuda(shm: Path, gpus: Cuda) -> None:
    made = create_on_device(shm, LAYOUT, 6, gpus.device(0), "auto")
    made.raise_generations([BlockRef(2, 9)], 1)
    seen = Arena.open(shm, LAYOUT.fingerprint)
    assert (seen.arena_id, seen.num_blocks, int(seen.generations[2])) == (made.arena_id, 6, 9)
    placement = seen.placement
    assert placement.memory is seen.memory is Memory.STORE_DEVICE and placement.device_uuid == gpus.uuid(0)
    assert placement.ipc_handle == made.data.export() and seen.is_writer_alive(placement.owner_slot)
    assert seen.live_writers() == [], "the owner of the memory is no writer"
    for use in (lambda: seen.data, lambda: seen.digest(2), lambda: seen.read(2)):
        with pytest.raises(ArenaError, match="in device memory that is not open here"):
            use()
    made.data.close()


def test_the_status_of_blocks_that_cannot_be_read_names_the_cause(shm: Path, gpus: Cuda) -> None:
    made, ref = create_on_device(shm, LAYOUT, 6, gpus.device(0), "auto"), BlockRef(1, 4)
    made.raise_generations([ref], 1)
    made.mark_sealed([ref], None, [0])
    source = BlockSource(Arena.open(shm), cast(LedgerScripts, None), KnownTickets())
    with pytest.raises(Unavailable, match="in device memory that is not open here"), as_statuses():
        source.read(0, [ref])
    made.data.close()


def test_blocks_outside_the_arena_cannot_be_reached(shm: Path, gpus: Cuda) -> None:
    arena = create_on_device(shm, LAYOUT, 6, gpus.device(0), "auto")
    for block in (-1, 6):
        with pytest.raises(IndexError):
            arena.read(block)
    with pytest.raises(ValueError, match="bytes, not 3"):
        arena.data.write(0, b"abc")
    arena.data.close()
    arena.data.close()


def test_a_seal_takes_no_digest_on_a_device_and_a_reader_gets_one(shm: Path, gpus: Cuda) -> None:
    arena, ref = create_on_device(shm, LAYOUT, 6, gpus.device(0), "auto"), BlockRef(1, 4)
    arena.raise_generations([ref], 1)
    view(arena.data)[1] = 7
    assert arena.seal_digests([ref]) == [0]
    arena.mark_sealed([ref], [b"h" * 32], arena.seal_digests([ref]))
    assert int(arena.digests[1]) == 0
    source = BlockSource(arena, cast(LedgerScripts, None), KnownTickets())  # which reading does not use
    sent = frames.decode(source.read(0, [ref]))
    assert (bytes(sent.data), sent.digests) == (bytes([7]) * LAYOUT.block_bytes, [arena.digest(1)])
    arena.mark_sealed([ref], [b"h" * 32], [arena.digest(1)])
    view(arena.data)[1, 5] = 8
    kept = frames.decode(source.read(0, [ref])).digests
    assert kept == [int(arena.digests[1])] != [arena.digest(1)], "a digest of the seal is kept"
    arena.data.close()


def test_a_block_is_read_from_the_device_once(shm: Path, gpus: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    arena, refs = create_on_device(shm, LAYOUT, 6, gpus.device(0), "auto"), [BlockRef(block, 4) for block in (1, 2, 5)]
    arena.raise_generations(refs, 1)
    arena.mark_sealed(refs, None, arena.seal_digests(refs))
    blocks: list[int] = []
    read = DeviceBlocks.read

    def reading(self: DeviceBlocks, block: int) -> bytes:
        blocks.append(block)
        return read(self, block)

    monkeypatch.setattr(DeviceBlocks, "read", reading)
    BlockSource(arena, cast(LedgerScripts, None), KnownTickets()).read(0, refs)
    assert blocks == [1, 2, 5]
    arena.data.close()


def test_memory_dies_with_the_store_and_the_arena_is_over(shm: Path, gpus: Cuda, cuda_library: str) -> None:
    store = python(STORE, str(shm), cuda_library)
    assert line(store) == "ready"
    worker = Arena.open(shm)
    open_blocks(worker, gpus)
    assert (view(worker.data)[5] == 55).all() and has_live_memory(worker)
    refs = [BlockRef(0, 3)]
    worker.raise_generations(refs, 9)
    store.kill()
    store.communicate(timeout=60)
    assert not has_live_memory(worker)
    worker.data.close()
    with pytest.raises(NoDeviceMemory, match=r"cuIpcOpenMemHandle_v2 failed: .*share a PID namespace.*--memory-owner"):
        open_blocks(Arena.open(shm), gpus)
    assert worker.check_refs(refs) and not worker.is_lost
    Arena.open(shm).declare_lost()  # as the next store does
    assert worker.is_lost and not worker.check_refs(refs), "reader rule"
    with pytest.raises(HeaderAheadError):
        worker.raise_generations([BlockRef(1, 2**63)], 9)
    with pytest.raises(HeaderMismatch):
        worker.mark_sealed(refs, None, [0])


def test_without_ipc_the_worker_owns_the_memory(
    shm: Path, gpus: Cuda, cuda_library: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("STAND_IN_CUDA_NO_IPC", "1")
    with pytest.raises(NoDeviceMemory, match=r"CUDA_ERROR_NOT_SUPPORTED; this host has no CUDA IPC"):
        create_on_device(shm, LAYOUT, 6, gpus.device(0), "store")
    assert not (shm / "arena").exists() and gpus.device(0).memory_info().free == 64 << 20
    with caplog.at_level(logging.WARNING):
        arena = create_on_device(shm, LAYOUT, 6, gpus.device(0), "auto")
    assert [record.message for record in caplog.records if "no CUDA IPC" in record.message] == [
        "no CUDA IPC (cuIpcGetMemHandle failed: CUDA_ERROR_NOT_SUPPORTED): the worker owns the arena's memory, and all "
        "KV is lost when it ends"
    ]
    assert arena.placement.memory is arena.memory is Memory.WORKER_DEVICE and has_live_memory(arena), "not allocated"
    worker = python(WORKER + "    data[0] = 1; print('mine', flush=True); sys.stdin.readline()", str(shm), cuda_library)
    assert line(worker) == "mine"
    assert gpus.device(0).memory_info().free == 62 << 20 and has_live_memory(arena)
    assert arena.memory is Memory.WORKER_DEVICE and arena.placement.owner_slot > 0
    with pytest.raises(ArenaBusy, match="belongs to another process"):
        open_blocks(Arena.open(shm), gpus)
    worker.kill()
    worker.communicate(timeout=60)
    assert not has_live_memory(arena)
    with pytest.raises(ArenaBusy):
        open_blocks(Arena.open(shm), gpus)
    arena.declare_lost()
    with pytest.raises(ArenaLost):
        open_blocks(Arena.open(shm), gpus)


def test_too_little_device_memory_is_said_and_leaves_nothing(
    shm: Path, gpus: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NoDeviceMemory, match=r"200000 blocks of 512 bytes: .*CUDA_ERROR_OUT_OF_MEMORY"):
        create_on_device(shm, LAYOUT, 200_000, gpus.device(0), "auto")
    assert os.listdir(shm) == []
    create_on_device(shm, LAYOUT, 6, gpus.device(0), "worker")
    taken = DeviceBlocks.allocate(gpus.device(0), 63 << 11, LAYOUT.block_bytes)
    with pytest.raises(NoDeviceMemory, match="CUDA_ERROR_OUT_OF_MEMORY; lower --gpu-memory-utilization"):
        open_blocks(Arena.open(shm), gpus)
    taken.close()
    assert gpus.device(0).memory_info().free == 64 << 20


def test_an_arena_that_gets_no_owner_leaves_nothing(shm: Path, gpus: Cuda) -> None:
    (shm / "writers").mkdir()
    (shm / "writers/next").write_text("not a number")
    with pytest.raises(ValueError, match="invalid literal"):
        create_on_device(shm, LAYOUT, 6, gpus.device(0), "store")
    assert os.listdir(shm) == [] and gpus.device(0).memory_info().free == 64 << 20


def test_an_owner_can_free_the_memory_of_an_arena_that_nobody_uses(shm: Path, gpus: Cuda) -> None:
    arena = create_on_device(shm, LAYOUT, 6, gpus.device(0), "store")
    assert has_live_memory(arena) and gpus.device(0).memory_info().free < 64 << 20
    arena.free_memory()
    assert not has_live_memory(arena) and gpus.device(0).memory_info().free == 64 << 20
    with pytest.raises(ArenaError, match="not open here"):
        arena.read(0)
