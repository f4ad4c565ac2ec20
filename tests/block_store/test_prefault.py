"""Memory that is allocated before the arena's size is known: too little, exactly enough, or too much."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest

from block_store.arena.arena import FILE_NAME, Arena
from block_store.arena.prefault import Prefault
from block_store.errors import ArenaError, ArenaExists, NotEnoughSharedMemory
from testing.ledger.store import LAYOUT, python
from testing.system import wait_for


def taken(shm: Path, most_bytes: int) -> Prefault:
    ahead = Prefault(shm, most_bytes)
    wait_for(lambda: ahead.num_bytes, lambda size: size == most_bytes, 60.0, "the memory is not taken")
    return ahead


@pytest.mark.parametrize("most_bytes", [4096, 1 << 20, 5 << 20])
def test_an_arena_of_memory_taken_ahead_is_like_any_other(shm: Path, most_bytes: int) -> None:
    plain = Arena.create(shm / "plain", LAYOUT, 64)
    ahead = taken(shm, most_bytes)
    made = Arena.create(shm / "ahead", LAYOUT, 64, ahead=ahead)
    ahead.close()
    found, expected = (os.stat(arena.directory / FILE_NAME) for arena in (made, plain))
    assert (found.st_size, found.st_blocks, found.st_mode) == (expected.st_size, expected.st_blocks, expected.st_mode)
    assert not made.data.any() and not made.generations.any()
    assert Arena.open(shm / "ahead").arena_id == made.arena_id


def test_what_was_not_used_is_given_back(shm: Path) -> None:
    ahead = taken(shm, 3 << 20)
    assert os.fstat(ahead._fd).st_blocks * 512 == 3 << 20
    ahead.close()
    assert not list(shm.iterdir())
    with pytest.raises(OSError):
        os.fstat(ahead._fd)


def test_an_arena_that_exists_or_does_not_fit_is_refused(shm: Path) -> None:
    Arena.create(shm, LAYOUT, 4)
    ahead = taken(shm, 4096)
    with pytest.raises(ArenaExists):
        Arena.create(shm, LAYOUT, 4, ahead=ahead)
    with pytest.raises(NotEnoughSharedMemory):
        Arena.create(shm / "other", LAYOUT, 1 << 40, ahead=ahead)
    ahead.close()


def test_less_memory_than_hoped_for_is_no_error_yet(shm: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))  # like a full file system, but EFBIG instead of ENOSPC
    try:
        ahead = Prefault(shm, 8 << 20)
        ahead.stop()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert ahead.num_bytes == 0
    Arena.create(shm, LAYOUT, 4, ahead=ahead)
    ahead.close()


def test_a_process_killed_while_it_creates_an_arena_leaves_no_file_behind(shm: Path) -> None:
    """In a container, where every store is process 1, the next one can create an arena."""
    code = """if True:
        import os, signal, sys
        from block_store.arena.arena import Arena
        from testing.ledger.store import LAYOUT
        os.posix_fallocate = lambda *file: os.kill(os.getpid(), signal.SIGKILL)
        Arena.create(sys.argv[1], LAYOUT, 64)
    """
    process = python(code, str(shm))
    assert process.wait(timeout=60) == -signal.SIGKILL
    assert not list(shm.iterdir())
    Arena.create(shm, LAYOUT, 64)


def test_a_file_system_without_unnamed_files_is_refused() -> None:
    with pytest.raises(ArenaError, match=r"/proc/self: .+; its file system must support unnamed files"):
        Arena.create("/proc/self", LAYOUT, 4)
