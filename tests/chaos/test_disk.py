"""The scenarios of the cache on disk, at their smallest size. `make chaos` runs them with 100 and 20 kills."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from block_store.disk.block_file import BlockFile
from testing.chaos import disk
from testing.chaos.disk_restart import disk_restart
from testing.chaos.run import Run

pytestmark = pytest.mark.chaos


def test_a_block_store_that_is_killed_while_it_copies_leaves_no_wrong_block(run: Run) -> None:
    report = disk.disk_kill(replace(run, trials=4))
    assert report.good, report.text()


def test_a_deployment_that_is_killed_while_blocks_are_copied_gives_the_oracles_tokens_again(run: Run) -> None:
    report = disk_restart(replace(run, trials=3))
    assert report.good, report.text()


def test_wrong_damaged_and_lost_blocks_are_told_apart(tmp_path: Path) -> None:
    """A block, a block with the bytes and digest of another one, and two blocks that are not on disk."""
    right, wrong, absent = (bytes([number]) * 32 for number in (1, 2, 3))
    file = BlockFile(disk.files_of(tmp_path, disk.LAYOUT), disk.LAYOUT.block_bytes, disk.KV_DISK_BYTES)
    data = disk.content(right)
    for name in (right, wrong):
        assert file.store(name, xxhash.xxh3_64_intdigest(data.data), data, lambda: True)
    file.close()
    with disk.running(tmp_path) as host:
        assert disk.restore(host, {right: True, wrong: True}) == disk.Restored(1, 1, 0, 0)
        assert disk.restore(host, {absent: False, bytes([4]) * 32: True}) == disk.Restored(0, 0, 1, 1)
