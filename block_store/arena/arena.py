"""The arena, a file in shared memory with a header and equally sized blocks (long: all rules concern the same header).

The block store, the workers on its host and `fsck` map this file. On a GPU the file contains only the header; the
blocks are in device memory (`placement`). The header can be read without Redis and without CUDA. References to blocks
are recorded in the ledger. This module implements the writer rule (a block's header generation is raised from a lower
value before the first write) and the reader rule (a block is valid only while its header names the generation in the
block table).
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from block_store.arena import atomics
from block_store.arena.device_memory import DeviceBlocks
from block_store.arena.header import (
    FIXED_BYTES,
    MEMORY_AT,
    REBUILD_COUNT_AT,
    ArenaOffsets,
    FixedHeader,
    HeaderState,
    Memory,
    Placement,
    round_up,
)
from block_store.arena.huge_pages import map_file
from block_store.arena.prefault import Prefault
from block_store.arena.writer_slots import WriterSlot, WriterSlots
from block_store.errors import (
    ArenaError,
    ArenaExists,
    ArenaLost,
    HeaderAheadError,
    HeaderMismatch,
    LayoutMismatch,
    NotEnoughSharedMemory,
)
from common.types import BlockRef, KvLayout

U8 = npt.NDArray[np.uint8]
FILE_NAME = "arena"
_NO_HASH = bytes(32)
_LOST_GENERATION = np.uint64(2**64 - 1)


def ref_arrays(refs: Sequence[BlockRef]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
    """Returns the block numbers int64[n] and generations uint64[n] of `refs`."""
    blocks, generations = zip(*refs, strict=True) if refs else ((), ())
    return np.array(blocks, np.int64), np.array(generations, np.uint64)


class Arena:
    """An arena file that this process has mapped. Its arrays remain valid as long as the object, or any view of an
    array, exists.
    """

    def __init__(self, directory: Path, header: FixedHeader, mapping: memoryview) -> None:
        self.directory = directory
        self._header = header
        self.mapping = mapping
        """The whole file."""
        n, at = header.num_blocks, ArenaOffsets.of(header.num_blocks)
        self.generations: npt.NDArray[np.uint64] = np.frombuffer(mapping, np.uint64, n, at.generations)  # [num_blocks]
        self.digests: npt.NDArray[np.uint64] = np.frombuffer(mapping, np.uint64, n, at.digests)  # [num_blocks]
        self.hashes: U8 = np.frombuffer(mapping, np.uint8, n * 32, at.hashes).reshape(n, 32)
        self.writer_slots: npt.NDArray[np.uint32] = np.frombuffer(mapping, np.uint32, n, at.writer_slots)
        self.states: U8 = np.frombuffer(mapping, np.uint8, n, at.states)  # [num_blocks], HeaderState
        self._rebuild_count: npt.NDArray[np.uint64] = np.frombuffer(mapping, np.uint64, 1, REBUILD_COUNT_AT)
        self._data: U8 | DeviceBlocks | None = None  # [num_blocks, block_bytes]
        if header.placement.memory is Memory.HOST:
            size = header.block_bytes
            self._data = np.frombuffer(mapping, np.uint8, n * size, at.data).reshape(n, size)
        self._owner: WriterSlot | None = None
        """The slot that proves that this process, which owns the device memory, is alive."""
        self._slots = WriterSlots(directory / "writers")

    @classmethod
    def create(
        cls, directory: str | os.PathLike[str], layout: KvLayout, num_blocks: int, run_id: str = "", dataset: str = "",
        placement: Placement | None = None, ahead: Prefault | None = None,
    ) -> Arena:  # fmt: skip
        """Creates the arena file with empty blocks, and maps it. All memory of the file is allocated here, so that no
        later write to it can raise SIGBUS. `ahead` supplies memory that was allocated earlier.

        `run_id` and `dataset` are usually filled in by `enter_ledger`; `placement` comes from `create_on_device`.
        Raises ArenaError if `num_blocks` is below 1, the layout does not fit into the header, or the file system does
        not support unnamed files; ArenaExists if the directory already has an arena; and NotEnoughSharedMemory if the
        file does not fit.
        """
        if num_blocks < 1:
            raise ArenaError(f"num_blocks must be at least 1, not {num_blocks}")
        where = Path(directory)
        where.mkdir(parents=True, exist_ok=True)
        if (where / FILE_NAME).exists():
            raise ArenaExists(f"{where / FILE_NAME} exists; open it, or remove it if no worker uses it")
        header = FixedHeader(
            num_blocks, layout.block_bytes, ArenaOffsets.of(num_blocks).data, secrets.token_hex(8), layout.fingerprint,
            0, run_id, dataset, layout, placement or Placement(),
        )  # fmt: skip
        try:
            memory = ahead or Prefault(where, 0)
        except OSError as error:
            message = f"{where}: {error.strerror}; its file system must support unnamed files, as tmpfs does"
            raise ArenaError(message) from error
        try:
            _name_file(where, memory, header.encode(), header.file_bytes)
        finally:
            if ahead is None:
                memory.close()
        return cls.open(where, layout.fingerprint)

    @classmethod
    def open(cls, directory: str | os.PathLike[str], layout_fingerprint: bytes | None = None) -> Arena:
        """Maps the arena in the directory; `placement.open_blocks` opens blocks in device memory.

        Raises ArenaError if there is no arena, or if it is damaged or has a different version, and LayoutMismatch if
        its layout differs.
        """
        path = Path(directory) / FILE_NAME
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise ArenaError(f"no arena at {path}") from None
        try:
            header = FixedHeader.decode(os.pread(fd, FIXED_BYTES, 0), str(path))
            size, found = header.file_bytes, os.fstat(fd).st_size
            if found < size:
                raise ArenaError(f"{path} has {found} bytes, but its header requires {size}")
            if layout_fingerprint is not None and layout_fingerprint != header.layout_fingerprint:
                raise LayoutMismatch(f"{path} was created for a different KV layout: {header.layout}")
            return cls(path.parent, header, map_file(fd, size))
        finally:
            os.close(fd)

    @property
    def arena_id(self) -> str:
        return self._header.arena_id

    @property
    def path(self) -> Path:
        return self.directory / FILE_NAME

    @property
    def data_offset(self) -> int:
        """The byte offset of the blocks in the file, if they are in host memory."""
        return ArenaOffsets.of(self._header.num_blocks).data

    @property
    def num_blocks(self) -> int:
        return self._header.num_blocks

    @property
    def block_bytes(self) -> int:
        return self._header.block_bytes

    @property
    def layout(self) -> KvLayout:
        return self._header.layout

    @property
    def fixed(self) -> FixedHeader:
        """The header's fixed page. It is read from the file on each access, because other processes may change it."""
        return FixedHeader.decode(bytes(self.mapping[:FIXED_BYTES]), str(self.directory))

    @property
    def data(self) -> Any:
        """The blocks, uint8 [num_blocks, block_bytes]: a numpy array, or on a GPU `DeviceBlocks`, which torch reads
        through its `__cuda_array_interface__`. Raises ArenaError if the blocks are in device memory that this process
        has not opened.
        """
        return self._blocks

    @property
    def _blocks(self) -> U8 | DeviceBlocks:
        if self._data is None:
            raise ArenaError(f"the blocks of arena {self.arena_id} are in device memory that is not open here")
        return self._data

    @property
    def placement(self) -> Placement:
        """The current placement of the blocks."""
        return self.fixed.placement

    @property
    def memory(self) -> Memory:
        """The current kind of memory of the blocks, without the rest of the placement."""
        return Memory(self.mapping[MEMORY_AT])

    @property
    def is_lost(self) -> bool:
        return self.fixed.is_lost

    def use_memory(self, blocks: DeviceBlocks, owner: WriterSlot | None = None) -> None:
        """Sets the device memory that contains the blocks. If this process owns it, `owner` is the owner's slot."""
        self._data, self._owner = blocks, owner

    def free_memory(self) -> None:
        """Frees the device memory, and closes the owner's slot, if this process owns the memory. Call it only if no
        process uses the blocks.
        """
        if self._owner is not None and isinstance(self._data, DeviceBlocks):
            self._data.close()
            self._owner.close()
            self._data = self._owner = None

    def place(self, placement: Placement) -> None:
        """Writes the placement of the blocks to the header. Call this inside `exclusively` if another process might
        also write the placement.
        """
        self._rewrite(placement=placement)

    def keep_largest_floor(self, num_blocks: int) -> None:
        """Writes to the header the largest floor, in blocks, that a worker requested before the arena was created."""
        self._rewrite(largest_floor=num_blocks)

    def declare_lost(self) -> None:
        """Marks the arena as lost in the header. After that, no block table matches (reader rule), and no generation
        can be raised (writer rule). Raises ArenaLost if the arena's file has been removed.
        """
        with self.exclusively():
            self._rewrite(is_lost=True)
        self.generations[:] = _LOST_GENERATION

    @property
    def rebuild_count(self) -> int:
        """The current rebuild count of the ledger, read after all earlier stores of this thread (a full fence)."""
        atomics.fence()
        return int(self._rebuild_count[0])

    def enter_ledger(self, run_id: str, dataset: str, rebuild_count: int) -> None:
        """Writes the identity and the rebuild count of the blocks' ledger to the header, where other processes can see
        them before this thread's next read. Raises ArenaLost if the arena's file has been removed.
        """
        with self.exclusively():
            self._rewrite(run_id=run_id, dataset=dataset, rebuild_count=rebuild_count)
        atomics.fence()

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """Returns a context that locks the fixed page for a change that another process might also make. Raises
        ArenaLost if the arena's file has been removed.
        """
        try:
            fd = os.open(self.directory / FILE_NAME, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise ArenaLost(f"arena {self.arena_id} was removed") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _rewrite(self, **changes: Any) -> None:
        encoded = replace(self.fixed, **changes).encode()
        self.mapping[: len(encoded)] = encoded

    def acquire_writer_slot(self) -> WriterSlot:
        """Returns a new writer slot, which this process holds until the slot is closed or the process ends. Acquire a
        slot before you register as a holder.
        """
        return self._slots.acquire()

    def is_writer_alive(self, number: int) -> bool:
        return self._slots.is_alive(number)

    def live_writers(self) -> list[int]:
        """Returns the numbers of the writer slots that processes still hold, excluding the slot of the memory owner."""
        return [slot for slot in self._slots.alive() if slot != self.placement.owner_slot]

    def raise_generations(self, refs: Sequence[BlockRef], writer_slot: int) -> None:
        """Raises the header generations to those of `refs` (writer rule), and enters the writer slot and the state
        WRITING. Must be called before the first write into `refs`. Raises HeaderAheadError if a header generation is
        not below the new generation; the caller must then write into none of the blocks.
        """
        if not refs:
            return
        ids, gens = ref_arrays(refs)
        if (bad := atomics.raise_generations(self.generations, ids, gens)) is not None:
            block = refs[bad].block
            raise HeaderAheadError(refs[bad], int(self.generations[block]) if 0 <= block < self.num_blocks else -1)
        self.writer_slots[ids] = writer_slot
        self.hashes[ids] = 0
        atomics.enter_states(self.states, ids, HeaderState.WRITING)

    def mark_sealed(
        self, refs: Sequence[BlockRef], hashes: Sequence[bytes | None] | None, digests: Sequence[int]
    ) -> None:
        """Marks blocks, whose content is final, as SEALED in the header, and enters their hashes and digests. A hash is
        None for a partial block; `hashes` is None if all blocks are partial.

        Raises HeaderMismatch if a block has been reallocated or the arena is lost.
        """
        ids, gens = ref_arrays(refs)
        if not self.check(ids, gens):
            raise HeaderMismatch("a block to be sealed was reallocated (its generation changed)")
        entered = hashes if hashes is not None else [None] * len(refs)
        packed = b"".join(_NO_HASH if h is None else h for h in entered)
        self.hashes[ids] = np.frombuffer(packed, np.uint8).reshape(len(refs), 32)
        self.digests[ids] = np.asarray(digests, np.uint64)
        atomics.enter_states(self.states, ids, HeaderState.SEALED)

    def check(self, block_ids: npt.NDArray[np.generic], generations: npt.NDArray[np.generic]) -> bool:
        """Returns whether the header generation of every block equals the generation at the same position in
        `generations` (reader rule). Must be called both before and after the blocks are read.
        """
        return atomics.first_mismatch(self.generations, block_ids, generations) is None

    def expect(self, block_ids: npt.NDArray[np.generic], generations: npt.NDArray[np.generic]) -> atomics.Expected:
        """Returns a prepared `check`, for repeated use. Neither array may be changed meanwhile."""
        return atomics.Expected(self.generations, block_ids, generations)

    def check_refs(self, refs: Sequence[BlockRef]) -> bool:
        """Returns the result of `check` for the blocks and generations of `refs`."""
        return self.check(*ref_arrays(refs))

    def has(self, refs: Sequence[BlockRef], hashes: Sequence[bytes]) -> bool:
        """Returns whether each block of `refs` still has its generation and, in the header, the prefix hash at the same
        position in `hashes`. `hashes` may be longer than `refs`; if it is shorter, the result is False.
        """
        ids, gens = ref_arrays(refs)
        if len(hashes) < len(refs) or not self.check(ids, gens):
            return False
        return self.hashes[ids].tobytes() == b"".join(hashes[: len(refs)])

    def read(self, block: int) -> bytes:
        """Returns a copy of the block's current bytes, whether they are in host or device memory."""
        blocks = self._blocks
        return blocks[block].tobytes() if isinstance(blocks, np.ndarray) else blocks.read(block)

    def view(self, block: int) -> bytes | memoryview:
        """Returns the block's current bytes: a view if they are in host memory, a copy if they are in device memory."""
        blocks = self._blocks
        return blocks[block].data if isinstance(blocks, np.ndarray) else blocks.read(block)

    def views(self, blocks: npt.NDArray[np.int64]) -> Sequence[bytes | memoryview]:
        """Returns the current bytes of several blocks, in order. If they are in host memory, the result contains the
        views that `places` returns; if they are in device memory, it contains a copy of each block.
        """
        data = self._blocks
        return self.places(blocks) if isinstance(data, np.ndarray) else [data.read(int(block)) for block in blocks]

    def places(self, blocks: npt.NDArray[np.int64]) -> list[memoryview]:
        """Returns the host memory of several blocks, in order: one view for each run of consecutive block numbers. The
        blocks must be in host memory.
        """
        data, size = self._blocks, self.block_bytes
        assert isinstance(data, np.ndarray)
        memory = memoryview(data).cast("B")  # type: ignore[arg-type]
        runs: list[list[int]] = []
        for number in blocks.tolist():
            if runs and runs[-1][1] == number:
                runs[-1][1] += 1
            else:
                runs.append([number, number + 1])
        return [memory[first * size : end * size] for first, end in runs]

    def digest(self, block: int) -> int:
        """Returns the 64-bit XXH3 hash of the block's current bytes."""
        return xxhash.xxh3_64_intdigest(self.view(block))

    def seal_digests(self, refs: Sequence[BlockRef]) -> list[int]:
        """Returns the digests that `mark_sealed` writes. The digest of a block on a device is 0 (none), because
        computing it would copy the block to the host in the step thread. The digest is computed when the block is sent
        to another host (`transfer.block_source`).
        """
        return [self.digest(ref.block) if isinstance(self._blocks, np.ndarray) else 0 for ref in refs]

    def remove(self) -> None:
        """Removes the arena file and the files of its writer slots. Existing mappings remain usable until they are
        dropped.
        """
        (self.directory / FILE_NAME).unlink(missing_ok=True)
        self._slots.remove()


def _name_file(where: Path, memory: Prefault, head: bytes, size: int) -> None:
    """Creates the arena file from `memory`, and allocates what is missing. Unlike a rename, a link does not replace an
    existing file. Raises NotEnoughSharedMemory if the file does not fit, and ArenaExists if there is already an arena.
    """
    memory.stop()
    available = _free_bytes(where) + memory.num_bytes
    if available < size:
        raise NotEnoughSharedMemory(str(where), size, available)
    try:
        memory.become(where / FILE_NAME, head, round_up(size, mmap.PAGESIZE))
    except FileExistsError:
        raise ArenaExists(f"{where / FILE_NAME} exists") from None
    except OSError as error:
        raise NotEnoughSharedMemory(str(where), size, available) from error


def _free_bytes(where: Path) -> int:
    stat = os.statvfs(where)
    return stat.f_bavail * stat.f_frsize


__all__ = ["Arena", "WriterSlot", "ref_arrays"]
