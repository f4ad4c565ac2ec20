"""Arenas in huge pages, and what happens where the system has none."""

from __future__ import annotations

import errno
import logging
import os
import re
import time
from pathlib import Path

import numpy as np
import pytest

from block_store.arena import huge_pages, promotion
from block_store.arena.arena import Arena
from block_store.arena.huge_pages import PAGE_BYTES
from block_store.arena.promotion import Promotion
from common.telemetry import fallback_counts
from common.types import KvLayout, KvSpec
from testing.ledger.store import python

LARGE = KvLayout(16, (KvSpec(num_layers=8, num_kv_heads=4, head_dim=64, dtype="bfloat16"),))  # 128 KiB a block
NUM_BLOCKS = 100
FALLBACK = "arena in small pages"


def huge_kib(path: str) -> int:
    """Returns how many KiB of the file this process has mapped in huge pages."""
    found, is_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_file = path in line
        elif is_file and line.startswith("ShmemPmdMapped:"):
            found += int(line.split()[1])
    return found


@pytest.fixture
def has_huge_pages(shm: Path) -> None:
    fd = os.open(shm, os.O_TMPFILE | os.O_RDWR)
    try:
        os.posix_fallocate(fd, 0, PAGE_BYTES)
        huge_pages.collapse(huge_pages.map_file(fd, PAGE_BYTES), 0, PAGE_BYTES)
    except OSError as error:
        pytest.skip(f"no huge pages for shared memory here: {error.strerror}")
    finally:
        os.close(fd)


@pytest.mark.usefixtures("has_huge_pages")
def test_an_arena_becomes_huge_in_every_mapping(shm: Path) -> None:
    made = Arena.create(shm, LARGE, NUM_BLOCKS)
    made.data[0] = 7
    assert huge_kib(str(made.path)) == 0
    Promotion(made.mapping).join()
    whole = os.stat(made.path).st_size // PAGE_BYTES * PAGE_BYTES >> 10
    for number, arena in enumerate((made, Arena.open(shm)), 1):
        assert (arena.data[0] == 7).all() and not arena.data[1:].any() and not arena.generations.any()
        assert huge_kib(str(made.path)) == number * whole


@pytest.mark.usefixtures("has_huge_pages")
def test_blocks_that_are_in_use_keep_their_content_while_pages_become_huge(shm: Path) -> None:
    made = Arena.create(shm, LARGE, 600)
    made.data[:] = np.arange(600, dtype=np.uint16).astype(np.uint8)[:, None]
    writer = python(
        """if True:
        import sys
        from block_store.arena.arena import Arena
        blocks = Arena.open(sys.argv[1]).data[::7]
        print("ready", flush=True)
        while not sys.stdin.closed:
            blocks += 1
            print(int(blocks[0, 0]), flush=True)
            if not sys.stdin.readline():
                break
        """,
        str(shm),
    )
    assert writer.stdin is not None and writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    moving = Promotion(made.mapping)
    rounds = 0
    while moving.is_running or rounds < 3:
        rounds += 1
        assert int(writer.stdout.readline()) == rounds % 256
        writer.stdin.write("\n")
        writer.stdin.flush()
    assert int(writer.stdout.readline()) == (rounds + 1) % 256
    writer.stdin.close()
    assert writer.wait(60) == 0
    expected = np.arange(600) + (np.arange(600) % 7 == 0) * (rounds + 1)
    assert (made.data == expected.astype(np.uint8)[:, None]).all()
    assert huge_kib(str(made.path)) >= 600 * LARGE.block_bytes // PAGE_BYTES * PAGE_BYTES >> 10


def test_a_file_is_mapped_for_as_long_as_a_view_exists(shm: Path) -> None:
    fd = os.open(shm / "file", os.O_CREAT | os.O_RDWR)
    os.ftruncate(fd, PAGE_BYTES + 100)
    os.pwrite(fd, b"end", PAGE_BYTES + 97)
    view = huge_pages.map_file(fd, PAGE_BYTES + 100)
    os.close(fd)
    array = np.frombuffer(view, np.uint8)
    del view
    assert array.ctypes.data % PAGE_BYTES == 0 and array[-3:].tobytes() == b"end"
    array[0] = 1
    assert (shm / "file").read_bytes()[0] == 1
    assert str(shm / "file") in Path("/proc/self/maps").read_text()
    del array
    assert str(shm / "file") not in Path("/proc/self/maps").read_text()


def test_a_file_that_cannot_be_mapped_raises() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        huge_pages.map_file(-1, 4096)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        huge_pages.map_file(-1, 1 << 60)


def test_without_huge_pages_the_arena_is_in_small_ones_and_that_is_counted(
    shm: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(promotion, "collapse", refuse)
    before = fallback_counts().get(FALLBACK, 0)
    arena = Arena.create(shm, LARGE, NUM_BLOCKS)
    with caplog.at_level(logging.WARNING):
        Promotion(arena.mapping).join()
    assert fallback_counts()[FALLBACK] == before + 1 and "small pages: Invalid argument" in caplog.text


def test_pages_in_use_are_left_and_a_promotion_can_be_stopped(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena.create(shm, LARGE, NUM_BLOCKS)
    tried: list[int] = []

    def busy(view: memoryview, begin: int, end: int) -> None:
        tried.append(begin)
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(promotion, "collapse", busy)
    before = fallback_counts().get(FALLBACK, 0)
    Promotion(arena.mapping).join()
    assert tried == list(range(0, os.stat(arena.path).st_size // PAGE_BYTES * PAGE_BYTES, 8 << 20))
    assert fallback_counts().get(FALLBACK, 0) == before
    monkeypatch.setattr(promotion, "collapse", lambda *_: time.sleep(0.1))
    stopped = Promotion(arena.mapping)
    stopped.stop()  # otherwise, it would pause for 0.9 s
    assert not stopped.is_running
