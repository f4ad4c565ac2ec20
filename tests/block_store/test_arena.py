from __future__ import annotations

import fcntl
import os
import resource
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from block_store.arena.arena import Arena, ref_arrays
from block_store.arena.header import ArenaOffsets, HeaderState
from block_store.errors import (
    ArenaError,
    ArenaExists,
    HeaderAheadError,
    HeaderMismatch,
    LayoutMismatch,
    NotEnoughSharedMemory,
)
from common.types import BlockRef, KvKind, KvLayout, KvSpec
from testing.ledger.store import LAYOUT, line, python

TWO_GROUPS = KvLayout(16, (KvSpec(2, 1, 8, "bfloat16"), KvSpec(1, 1, 8, "float32", KvKind.SLIDING, 64)), "slots_first")


def test_what_was_made_is_found(shm: Path) -> None:
    made = Arena.create(shm, TWO_GROUPS, 5, "run", "data")
    made.data[3] = 7
    found = Arena.open(shm, TWO_GROUPS.fingerprint)
    assert (found.arena_id, found.num_blocks, found.layout) == (made.arena_id, 5, TWO_GROUPS)
    assert found.data.shape == (5, TWO_GROUPS.block_bytes) and (found.data[3] == 7).all() and not found.data[2].any()
    assert (found.fixed.run_id, found.fixed.dataset, found.fixed.rebuild_count) == ("run", "data", 0)
    found.enter_ledger("other", "set", 3)
    assert (made.fixed.run_id, made.fixed.dataset, made.fixed.rebuild_count) == ("other", "set", 3)


def test_an_arena_is_never_truncated_and_other_layouts_are_refused(shm: Path) -> None:
    made = Arena.create(shm, LAYOUT, 4)
    made.data[0] = 9
    with pytest.raises(ArenaExists):
        Arena.create(shm, LAYOUT, 8)
    with pytest.raises(LayoutMismatch):
        Arena.open(shm, TWO_GROUPS.fingerprint)
    assert (Arena.open(shm).data[0] == 9).all()
    assert not [name for name in os.listdir(shm) if name.startswith(".arena")]


def test_what_is_no_arena_is_refused(shm: Path) -> None:
    with pytest.raises(ArenaError, match="no arena at"):
        Arena.open(shm)
    (shm / "arena").write_bytes(b"x" * 8192)
    with pytest.raises(ArenaError, match="is not an arena"):
        Arena.open(shm)
    (shm / "arena").unlink()
    Arena.create(shm, LAYOUT, 4)
    for num_bytes in (5000, 4095, 300, 8):
        os.truncate(shm / "arena", num_bytes)
        with pytest.raises(ArenaError, match=f"has {num_bytes} bytes, but"):
            Arena.open(shm)


def test_too_large_an_arena_says_what_is_missing(shm: Path) -> None:
    with pytest.raises(NotEnoughSharedMemory, match=rf"shared memory at {shm}: the arena needs \d+ bytes, but \d+ are"):
        Arena.create(shm, LAYOUT, 10**10)
    assert os.listdir(shm) == []


def test_data_is_aligned_and_arrays_do_not_overlap() -> None:
    for num_blocks in (1, 63, 64, 1000):
        at = ArenaOffsets.of(num_blocks)
        starts = [at.generations, at.digests, at.hashes, at.writer_slots, at.states, at.data]
        sizes = [8, 8, 32, 4, 1]
        assert at.data % (2 << 20) == 0
        for start, size, following in zip(starts, sizes, starts[1:], strict=False):
            assert start % 64 == 0 and start + size * num_blocks <= following


def test_writer_rule_raises_from_lower_only(shm: Path) -> None:
    arena = Arena.create(shm, LAYOUT, 4)
    arena.raise_generations([BlockRef(1, 5), BlockRef(2, (7 << 32) + 1)], 3)
    assert arena.generations.tolist() == [0, 5, (7 << 32) + 1, 0]
    assert arena.writer_slots[1] == 3 and arena.states[2] == HeaderState.WRITING
    for bad in (BlockRef(1, 5), BlockRef(1, 4), BlockRef(4, 9), BlockRef(-1, 9)):
        with pytest.raises(HeaderAheadError):
            arena.raise_generations([bad], 3)
    assert arena.generations[1] == 5


def test_reader_rule_compares_with_the_table(shm: Path) -> None:
    arena = Arena.create(shm, LAYOUT, 4)
    refs = [BlockRef(1, 5), BlockRef(3, 6)]
    arena.raise_generations(refs, 1)
    ids, generations = ref_arrays(refs)
    assert arena.check(ids, generations) and arena.check(ids.astype(np.int32), generations.astype(np.int64))
    assert arena.check(ids[:0], generations[:0])
    arena.raise_generations([BlockRef(3, 7)], 2)
    assert not arena.check(ids, generations)
    assert not arena.check_refs([BlockRef(4, 0)]) and not arena.check_refs([BlockRef(-1, 0)])
    with pytest.raises(HeaderMismatch):
        arena.mark_sealed(refs, None, [0, 0])
    assert arena.states[1] == HeaderState.WRITING


def test_seal_marks_hash_and_digest(shm: Path) -> None:
    arena = Arena.create(shm, LAYOUT, 4)
    arena.raise_generations([BlockRef(0, 1), BlockRef(1, 1)], 1)
    before = arena.digest(0)
    arena.data[0] = 3
    assert arena.digest(0) != before
    arena.mark_sealed([BlockRef(0, 1), BlockRef(1, 1)], [b"h" * 32, None], [arena.digest(0), arena.digest(1)])
    assert arena.hashes[0].tobytes() == b"h" * 32 and not arena.hashes[1].any()
    assert int(arena.digests[0]) == arena.digest(0) and arena.states[0] == HeaderState.SEALED


def test_a_killed_process_loses_its_writer_slot_and_numbers_are_not_reused(shm: Path) -> None:
    arena = Arena.create(shm, LAYOUT, 4)
    code = (
        "import sys, time; from block_store.arena.arena import Arena\n"
        "slot = Arena.open(sys.argv[1]).acquire_writer_slot(); print(slot.number, flush=True); time.sleep(60)"
    )
    process = python(code, str(shm))
    number = int(line(process))
    mine = arena.acquire_writer_slot()
    assert arena.is_writer_alive(number) and arena.live_writers() == [number, mine.number]
    process.send_signal(signal.SIGSTOP)
    assert arena.is_writer_alive(number), "a stopped process may still store"
    process.kill()
    process.wait()
    assert not arena.is_writer_alive(number) and arena.is_writer_alive(mine.number)
    other = arena.acquire_writer_slot()
    assert other.number > mine.number > number
    mine.close()
    assert arena.live_writers() == [other.number] and not arena.is_writer_alive(999)


def test_a_slot_that_another_process_is_looking_at_is_acquired(shm: Path) -> None:
    arena = Arena.create(shm, LAYOUT, 4)
    arena.acquire_writer_slot().close()
    looking = os.open(shm / "writers" / "2.lock", os.O_CREAT | os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    threading.Timer(0.2, os.close, (looking,)).start()
    assert arena.acquire_writer_slot().number == 2 and arena.is_writer_alive(2)


def test_a_slot_whose_file_could_not_be_written_is_acquired_later(shm: Path) -> None:
    arena = Arena.create(shm, LAYOUT, 4)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # like a full file system, but EFBIG instead of ENOSPC
    try:
        with pytest.raises(OSError, match="File too large"):
            arena.acquire_writer_slot()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not arena.live_writers()
    slot = arena.acquire_writer_slot()
    assert arena.live_writers() == [slot.number]


def test_two_processes_share_blocks_and_race_for_generations(shm: Path) -> None:
    n = 3000
    arena = Arena.create(shm, LAYOUT, n)
    code = f"""if True:
        import sys
        from block_store.arena.arena import Arena
        from block_store.errors import HeaderAheadError
        from common.types import BlockRef
        arena, won = Arena.open(sys.argv[1]), 0
        print("ready", flush=True); sys.stdin.readline()
        for block in range({n}):
            try:
                arena.raise_generations([BlockRef(block, 1)], int(sys.argv[2]))
            except HeaderAheadError:
                continue
            arena.data[block] = int(sys.argv[2]); won += 1
        print(won, flush=True)
    """
    both = [python(code, str(shm), str(i + 1)) for i in range(2)]
    assert [line(process) for process in both] == ["ready", "ready"]
    for process in both:
        assert process.stdin is not None
        process.stdin.write("go\n")
    won = [int(line(process)) for process in both]
    for process in both:
        process.communicate(timeout=60)
    assert sum(won) == n, "a generation was raised by both or by neither"
    assert (arena.generations == 1).all()
    assert [int((arena.data[:, 0] == i + 1).sum()) for i in range(2)] == won
