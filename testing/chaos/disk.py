"""A scenario that kills a block store with SIGKILL while it copies blocks to disk, without a model.

A trial starts a block store with an empty arena, restores every block that earlier trials have left on disk, and
compares its bytes with those that were written. Then it seals blocks without a pause, and kills the store at a random
moment soon after the first copy. In every second trial, random sectors that the trial has written to disk then get
their earlier content back, as after a power cut.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from block_store.arena.header import HeaderState
from block_store.disk.block_file import BlockFile
from block_store.ledger.codec import SealItem
from common.types import KvLayout, KvSpec
from protos.v1 import block_store_pb2 as pb
from testing.chaos.report import Report
from testing.chaos.run import Run
from testing.ledger.hosts import Host

U8 = npt.NDArray[np.uint8]
LAYOUT = KvLayout(16, (KvSpec(num_layers=16, num_kv_heads=8, head_dim=128, dtype="bfloat16"),))
"""The layout of blocks of 1 MiB. The kernel copies such a block page by page, so a kill can interrupt the copy."""
NUM_SLOTS = 64
"""The number of blocks for which there is space on disk. It is so small that new blocks replace earlier ones."""
KV_DISK_BYTES = NUM_SLOTS * (LAYOUT.block_bytes + 64)
NUM_BLOCKS = 48
BATCH = 4
KILL_S = 0.1
"""The longest time in seconds from the first copy to the kill."""
SECTOR_BYTES = 512
READY_S = 10.0
"""The longest time in seconds until a new store restores its first block. On a busy machine, the store's holder of
restored blocks may not be registered at once; the store then restores nothing.
"""


@dataclass(frozen=True, slots=True)
class Restored:
    """The outcome of restoring all blocks that have a record on disk."""

    num_right: int
    num_wrong: int
    """Number of restored blocks whose bytes differ from those that were written."""
    num_damaged: int
    """Number of blocks that were not restored, and whose bytes on disk are not those that were written."""
    num_lost: int
    """Number of blocks that were not restored although their bytes on disk are those that were written."""


@dataclass(frozen=True, slots=True)
class Killed:
    """The state at a kill. The counts include only blocks that the trial sealed."""

    num_copied: int
    """Number of blocks on disk."""
    num_pending: int
    """Number of blocks that were sealed in the arena and not on disk."""
    num_torn: int
    """Number of blocks that were partly written to disk."""


def disk_kill(run: Run) -> Report:
    """Kills a block store in each trial."""
    report, rng = run.report("disk-kill"), run.rng
    names: dict[bytes, int] = {}
    restored: list[Restored] = []
    killed: list[Killed] = []
    with tempfile.TemporaryDirectory(prefix="looseleaf-chaos-") as directory:
        files = files_of(Path(directory), LAYOUT)
        for trial in range(run.trials + 1):
            on_disk = _on_disk(files, names)
            with running(Path(directory)) as host:
                restored.append(restore(host, on_disk))
                if trial < run.trials:
                    killed.append(_kill(host, files, names, rng, is_power_cut=trial % 2 == 1))
    _tell(report, restored, killed)
    return report


def _tell(report: Report, restored: list[Restored], killed: list[Killed]) -> None:
    num_restored = sum(found.num_right + found.num_wrong for found in restored)
    report.none("restored blocks with wrong bytes", sum(r.num_wrong for r in restored), num_restored, "blocks")
    report.none(
        "whole blocks on disk that were not restored", sum(r.num_lost for r in restored), num_restored, "blocks"
    )
    report.at_least("blocks restored", num_restored, report.trials)
    report.told("damaged blocks on disk, none restored", f"{sum(r.num_damaged for r in restored)} blocks")
    midway = sum(k.num_copied > 0 and k.num_pending > 0 for k in killed)
    report.at_least("trials with copied blocks and blocks yet to be copied", midway, report.trials // 2)
    report.told("  of these, with a partly written block", f"{sum(k.num_torn > 0 for k in killed)} trials")


@contextmanager
def running(kv_disk_dir: Path) -> Iterator[Host]:
    """Starts a host with a new arena. Kills its store at the end, unless the store has ended."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="ll-disk-", ignore_cleanup_errors=True) as directory:
        flags = ["--kv-disk", str(KV_DISK_BYTES), "--kv-disk-dir", str(kv_disk_dir)]
        host = Host(Path(directory) / "arena", NUM_BLOCKS, *flags, layout=LAYOUT)
        try:
            yield host
        finally:
            _end(host)


def _end(host: Host) -> None:
    """Kills the store, unless it has ended. Ends the worker's beats first, which could only fail."""
    host.held.holder.lease.end()
    if host.store.process.poll() is None:
        host.store.kill()


def files_of(kv_disk_dir: Path, layout: KvLayout) -> Path:
    """Returns the directory of the files with the blocks of a layout."""
    return kv_disk_dir / layout.fingerprint.hex()[:16]


def content(name: bytes) -> U8:
    """Returns the bytes of the block with this prefix hash, as uint8 [block_bytes]."""
    return np.frombuffer(np.random.default_rng(list(name)).bytes(LAYOUT.block_bytes), np.uint8)


def _on_disk(files: Path, names: Mapping[bytes, int]) -> dict[bytes, bool]:
    """Returns the blocks that have a record on disk, and for each whether its bytes are on disk. `names` contains the
    digests by prefix hash.
    """
    file = BlockFile(files, LAYOUT.block_bytes, KV_DISK_BYTES)
    try:
        digests = {xxhash.xxh3_64_intdigest(row.data) for row in _slots(files)}
        return {name: digest in digests for name, digest in names.items() if name in file}
    finally:
        file.close()


def _slots(files: Path) -> U8:
    """Returns the content of the slots on disk, as uint8 [NUM_SLOTS, block_bytes]."""
    return np.fromfile(files / "blocks", np.uint8).reshape(NUM_SLOTS, LAYOUT.block_bytes)


def _restore(host: Host, name: bytes) -> int:
    response: pb.RestoreResponse = host.stub.Restore(pb.RestoreRequest(prefix_hashes=[name]), timeout=60)
    return response.num_blocks


def restore(host: Host, on_disk: Mapping[bytes, bool]) -> Restored:
    right = wrong = damaged = lost = 0
    deadline = time.monotonic() + READY_S
    for name, is_whole in sorted(on_disk.items(), key=lambda item: not item[1]):  # the whole blocks first
        while not (num_blocks := _restore(host, name)) and is_whole and not right and time.monotonic() < deadline:
            time.sleep(0.1)
        if not num_blocks:
            lost += is_whole
            damaged += not is_whole
            continue
        [refs] = host.held.acquire([[name]])
        is_right = [host.arena.read(ref.block) for ref in refs] == [content(name).tobytes()]
        host.held.release(refs)
        right += is_right
        wrong += not is_right
    return Restored(right, wrong, damaged, lost)


def _kill(host: Host, files: Path, names: dict[bytes, int], rng: random.Random, *, is_power_cut: bool) -> Killed:
    """Seals blocks and adds them to `names`. Kills the store at a random moment."""
    before, index_before = _slots(files), np.fromfile(files / "index", np.uint8)
    earlier = len(names)
    _seal_and_kill(host, files / "blocks", names, rng)
    own = set(list(names)[earlier:])
    on_disk = {name for name in _on_disk(files, names) if name in own}
    sealed = {host.arena.hashes[block].tobytes() for block in np.flatnonzero(host.arena.states == HeaderState.SEALED)}
    changed = [row for row, old in zip(_slots(files), before, strict=True) if not np.array_equal(row, old)]
    torn = {xxhash.xxh3_64_intdigest(row.data) for row in changed} - set(names.values())
    if is_power_cut:
        for path, old in ((files / "blocks", before), (files / "index", index_before)):
            _cut_power(path, old, rng)
    return Killed(len(on_disk), len((sealed & own) - on_disk), len(torn))


def _seal_and_kill(host: Host, blocks: Path, names: dict[bytes, int], rng: random.Random) -> None:
    untouched, kill_at, deadline = blocks.stat().st_mtime_ns, float("inf"), time.monotonic() + 60
    while time.monotonic() < kill_at:
        assert time.monotonic() < deadline, "no block is copied to disk"
        items = []
        for ref in host.held.alloc(BATCH):
            name = rng.randbytes(32)
            host.arena.data[ref.block] = content(name)
            names[name] = host.arena.digest(ref.block)
            items.append(SealItem(ref, name))
        host.held.release_many([host.held.seal(items)])
        if kill_at == float("inf") and blocks.stat().st_mtime_ns != untouched:
            kill_at = time.monotonic() + rng.uniform(0, KILL_S)
    _end(host)


def _cut_power(path: Path, before: U8, rng: random.Random) -> None:
    """Gives a random share of the sectors that differ from `before` their earlier content back."""
    now, old = np.fromfile(path, np.uint8).reshape(-1, SECTOR_BYTES), before.reshape(-1, SECTOR_BYTES)
    share = 10 ** rng.uniform(-4, 0)
    is_lost = np.random.default_rng(rng.getrandbits(32)).random(len(now)) < share
    now[is_lost] = old[is_lost]
    now.tofile(path)
