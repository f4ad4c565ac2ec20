"""A store of KV blocks in two files on disk, which survive a restart of the block store.

`blocks` contains the bytes of the blocks in slots of equal size. `index` contains one record for each slot: the prefix
hash of its block, the digest of its bytes, and a number that grows with each stored block. The prefix hash alone
identifies a block, because it depends on the model, the numerics, the KV group and the tenant (`ledger.prefix_hash`).

    index   | hash, digest, 7 | hash, digest, 8 | empty | ...
    blocks  | bytes           | bytes           |       | ...

Nothing is flushed to the disk explicitly, so after a crash of the machine a record may refer to bytes of another block,
or to bytes that were only partly written. When such a block is read, its digest does not match, and the block counts as
missing.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from block_store.errors import DiskTierError

U8 = npt.NDArray[np.uint8]
_RECORD = struct.Struct("<32sQQQQ")  # hash, digest, count, unused, check
_NO_RECORD = bytes(_RECORD.size)


def _record(prefix_hash: bytes, digest: int, count: int) -> bytes:
    head = _RECORD.pack(prefix_hash, digest, count, 0, 0)[:-8]
    return head + xxhash.xxh3_64_intdigest(head).to_bytes(8, "little")


def _read_record(record: bytes) -> tuple[bytes, int, int] | None:
    """Returns the hash, digest and count of a record, or None if the slot is empty or the record is damaged."""
    if record == _NO_RECORD or xxhash.xxh3_64_intdigest(record[:-8]) != int.from_bytes(record[-8:], "little"):
        return None
    prefix_hash, digest, count, _, _ = _RECORD.unpack(record)
    return prefix_hash, digest, count


class BlockFile:
    """A cache on disk of blocks with the same KV layout. When the cache is full, a new block replaces the least
    recently used block. One thread may store blocks while others read.
    """

    def __init__(self, directory: Path, block_bytes: int, max_bytes: int) -> None:
        """Opens or creates the files in `directory`, which must not be used for blocks of any other layout.

        Raises DiskTierError if the directory cannot be written or is in use, or if `max_bytes` is too small for one
        block.
        """
        self.block_bytes = block_bytes
        self.num_slots = max_bytes // (block_bytes + _RECORD.size)
        if self.num_slots < 1:
            raise DiskTierError(f"--kv-disk: {max_bytes} bytes are less than one block of {block_bytes} bytes")
        self._lock = threading.Lock()
        """Protects the slots. It is not held while bytes are copied."""
        self._slots: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        """Slot and digest of each prefix hash, the least recently used first."""
        with ExitStack() as undo:
            try:
                directory.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._index = _open(directory / "index", self.num_slots * _RECORD.size)
                undo.callback(os.close, self._index)
                self._blocks = _open(directory / "blocks", self.num_slots * block_bytes)
                undo.callback(os.close, self._blocks)
                self._free, self._count = self._read_index()
            except BlockingIOError:
                raise DiskTierError(f"--kv-disk-dir {directory} is in use by another block store") from None
            except OSError as error:
                raise DiskTierError(f"--kv-disk-dir {directory}: {error.strerror}") from None
            undo.pop_all()

    def __contains__(self, prefix_hash: object) -> bool:
        return prefix_hash in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    def store(self, prefix_hash: bytes, digest: int, data: bytes | memoryview, is_current: Callable[[], bool]) -> bool:
        """Copies a block into the cache. The bytes may change during the copy, so the block is stored only if
        `is_current` returns True after the copy. Returns whether the block was stored. Raises OSError, for example if
        the disk is full. `data` has block_bytes bytes, and `digest` is its 64-bit XXH3 hash.
        """
        slot = self._take_slot()
        try:
            _write_all(self._blocks, memoryview(data), slot * self.block_bytes)
            is_kept = is_current()
            if is_kept:
                self._count += 1
                os.pwrite(self._index, _record(prefix_hash, digest, self._count), slot * _RECORD.size)
        except OSError:
            self._free.append(slot)
            raise
        if not is_kept:
            self._free.append(slot)
            return False
        with self._lock:
            self._slots[prefix_hash] = slot, digest
        return True

    def read_ahead(self, hashes: Iterable[bytes]) -> None:
        """Makes the kernel read all blocks with these hashes from the disk into memory, in large requests, while the
        caller continues. Otherwise, `read_into` waits for the disk at every block, and then for a core.
        """
        with self._lock:
            slots = sorted(self._slots[one][0] for one in hashes if one in self._slots)
        size = self.block_bytes
        for first, end in _runs(slots):
            os.posix_fadvise(self._blocks, first * size, (end - first) * size, os.POSIX_FADV_WILLNEED)

    def read_into(self, prefix_hash: bytes, row: U8) -> int | None:
        """Copies a block into `row`, uint8 [block_bytes], and returns its digest. Returns None if there is no such
        block, if it cannot be read, or if its digest does not match. In the last two cases, the block is removed, and
        the content of `row` is undefined.
        """
        with self._lock:
            if (found := self._slots.get(prefix_hash)) is None:
                return None
            self._slots.move_to_end(prefix_hash)
        slot, digest = found
        try:
            num_bytes = os.preadv(self._blocks, [row.data], slot * self.block_bytes)
        except OSError:
            num_bytes = 0
        if num_bytes == self.block_bytes and xxhash.xxh3_64_intdigest(row.data) == digest:
            return digest
        self._forget(prefix_hash, found)
        return None

    def close(self) -> None:
        os.close(self._blocks)
        os.close(self._index)  # also releases the lock

    def _forget(self, prefix_hash: bytes, found: tuple[int, int]) -> None:
        """Removes a damaged block, unless its slot has been reused since it was read."""
        with self._lock:
            if self._slots.get(prefix_hash) != found:
                return
            del self._slots[prefix_hash]
        os.pwrite(self._index, _NO_RECORD, found[0] * _RECORD.size)
        self._free.append(found[0])

    def _take_slot(self) -> int:
        """Returns a free slot. If there is none, evicts the least recently used block and returns its slot."""
        if self._free:
            return self._free.pop()
        with self._lock:
            _, (slot, _) = self._slots.popitem(last=False)
        os.pwrite(self._index, _NO_RECORD, slot * _RECORD.size)
        return slot

    def _read_index(self) -> tuple[list[int], int]:
        """Fills `_slots` from the records in the index. Returns the free slots, and the largest count."""
        packed = os.pread(self._index, self.num_slots * _RECORD.size, 0)
        found: dict[bytes, tuple[int, int, int]] = {}
        for slot in range(len(packed) // _RECORD.size):
            record = _read_record(packed[slot * _RECORD.size : (slot + 1) * _RECORD.size])
            if record is not None:
                prefix_hash, digest, count = record
                found[prefix_hash] = max(found.get(prefix_hash, (0, 0, 0)), (count, slot, digest))
        for prefix_hash, (_, slot, digest) in sorted(found.items(), key=lambda item: item[1]):
            self._slots[prefix_hash] = slot, digest
        used = {slot for slot, _ in self._slots.values()}
        free = [slot for slot in range(self.num_slots - 1, -1, -1) if slot not in used]
        return free, max((count for count, _, _ in found.values()), default=0)


def _runs(slots: Iterable[int]) -> list[tuple[int, int]]:
    """Returns the first slot and the end of each run of consecutive slots. `slots` are in ascending order."""
    runs: list[tuple[int, int]] = []
    for slot in slots:
        first = runs.pop()[0] if runs and runs[-1][1] == slot else slot
        runs.append((first, slot + 1))
    return runs


def _open(path: Path, num_bytes: int) -> int:
    """Opens and locks a file, and sets its length. Slots beyond the end are dropped; new slots take no space until they
    are written. Raises BlockingIOError if another process has locked the file.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, num_bytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _write_all(fd: int, data: memoryview, at: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], at + done)
