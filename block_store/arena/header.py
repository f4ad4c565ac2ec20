"""Byte layout of an arena file: one fixed page, arrays of per-block fields, then the blocks.

0        fixed page: magic .. layout JSON (`FIXED`, then JSON up to 4096)
4096     generation u64[n] | digest u64[n] | prefix hash u8[n, 32] | writer slot u32[n] | state u8[n],
         each at a multiple of 64
data     u8[n, block_bytes] at a multiple of 2 MiB (huge-page friendly); not in the file of an arena in device memory
"""

from __future__ import annotations

import functools
import json
import struct
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

from block_store.errors import ArenaError
from common.types import KvKind, KvLayout, KvSpec

MAGIC = b"LOOSLEAF"
VERSION = 3
FIXED_BYTES = 4096
DATA_ALIGNMENT = 2 << 20
# magic, version, JSON length, num_blocks, block_bytes, data offset, arena id, layout fingerprint, rebuild count,
# run_id, dataset, lost, memory, owner's slot, device UUID, IPC handle, largest floor
FIXED = struct.Struct("<8sIIQQQ16s32sQ40s16s?BI16s64sQ")
REBUILD_COUNT_AT = struct.calcsize("<8sIIQQQ16s32s")
"""Byte offset of the rebuild count, a multiple of 8."""
MEMORY_AT = struct.calcsize("<8sIIQQQ16s32sQ40s16s?")
"""Byte offset of the kind of memory, one byte."""


class HeaderState(IntEnum):
    """The state of a block in the header. The ledger distinguishes more states (`BlockState`)."""

    EMPTY = 0
    WRITING = 1
    SEALED = 2


class Memory(IntEnum):
    """The kind of memory that contains an arena's blocks. The values are those of the proto's `ArenaMemory`."""

    HOST = 1
    """The arena file. The blocks outlive every process, until a store removes the file."""
    STORE_DEVICE = 2
    """Device memory of the block store. The blocks outlive workers (docs/design.md, promise 4) but not the store."""
    WORKER_DEVICE = 3
    """Device memory of the only compute process, without CUDA IPC. The blocks are lost when that process ends, so
    promise 4 does not hold.
    """


@dataclass(frozen=True, slots=True)
class Placement:
    """The location of an arena's blocks: the kind of memory, the device, and the process that owns the memory."""

    memory: Memory = Memory.HOST
    device_uuid: bytes = b""
    """UUID of the GPU, 16 bytes; empty on the host."""
    owner_slot: int = 0
    """Writer slot whose lock proves that the owner of the device memory is alive. 0 if the memory is not allocated yet,
    or if it is not device memory.
    """
    ipc_handle: bytes = b""
    """IPC handle of the memory, 64 bytes, for STORE_DEVICE."""


@dataclass(frozen=True, slots=True)
class FixedHeader:
    """The decoded fixed page of an arena's header."""

    num_blocks: int
    block_bytes: int
    data_offset: int
    arena_id: str
    layout_fingerprint: bytes
    rebuild_count: int
    run_id: str
    dataset: str
    layout: KvLayout
    placement: Placement = Placement()
    is_lost: bool = False
    """Whether the blocks' memory is gone or the store has removed the arena. In both cases, nothing in the arena may be
    used.
    """
    largest_floor: int = 0
    """The largest floor that a worker requested before the arena was created (`sizing.granted_floor`)."""

    @property
    def file_bytes(self) -> int:
        """The size of the arena file. It excludes the blocks if they are in device memory."""
        on_host = self.placement.memory is Memory.HOST
        return arena_bytes(self.num_blocks, self.block_bytes) if on_host else self.data_offset

    def encode(self) -> bytes:
        text = encode_layout(self.layout)
        if FIXED.size + len(text) > FIXED_BYTES:
            raise ArenaError(f"a KV layout with {len(self.layout.groups)} groups does not fit into the arena's header")
        where = self.placement
        fixed = FIXED.pack(
            MAGIC, VERSION, len(text), self.num_blocks, self.block_bytes, self.data_offset, self.arena_id.encode(),
            self.layout_fingerprint, self.rebuild_count, self.run_id.encode(), self.dataset.encode(), self.is_lost,
            where.memory, where.owner_slot, where.device_uuid, where.ipc_handle, self.largest_floor,
        )  # fmt: skip
        return fixed + text

    @classmethod
    def decode(cls, page: bytes, path: str) -> FixedHeader:
        if page[: len(MAGIC)] != MAGIC:
            raise ArenaError(f"{path} is not an arena")
        if len(page) < FIXED_BYTES:
            raise ArenaError(f"{path} has {len(page)} bytes, but the first page of an arena has {FIXED_BYTES}")
        _, version, text_len, blocks, size, offset, arena, layout, rebuilds, *rest = FIXED.unpack_from(page)
        if version != VERSION:
            raise ArenaError(f"{path} has arena version {version}, but this program reads version {VERSION}")
        run_id, dataset, is_lost, memory, owner_slot, uuid, handle, largest_floor = rest
        on_device = memory != Memory.HOST
        placement = Placement(Memory(memory), uuid if on_device else b"", owner_slot, handle if on_device else b"")
        return cls(
            blocks, size, offset, arena.decode(), layout, rebuilds, run_id.rstrip(b"\0").decode(),
            dataset.rstrip(b"\0").decode(), decode_layout(page[FIXED.size : FIXED.size + text_len]), placement, is_lost,
            largest_floor,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ArenaOffsets:
    """Byte offsets of the per-block arrays and of the data."""

    generations: int
    digests: int
    hashes: int
    writer_slots: int
    states: int
    data: int

    @classmethod
    def of(cls, num_blocks: int) -> ArenaOffsets:
        offsets = [FIXED_BYTES]
        for field_bytes in (8, 8, 32, 4, 1):
            offsets.append(round_up(offsets[-1] + field_bytes * num_blocks, 64))
        generations, digests, hashes, writer_slots, states, end = offsets
        return cls(generations, digests, hashes, writer_slots, states, round_up(end, DATA_ALIGNMENT))


def arena_bytes(num_blocks: int, block_bytes: int) -> int:
    """Returns the size of a file that contains the header and the blocks."""
    return ArenaOffsets.of(num_blocks).data + num_blocks * block_bytes


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def encode_layout(layout: KvLayout) -> bytes:
    return json.dumps(asdict(layout), sort_keys=True, separators=(",", ":")).encode()


@functools.lru_cache(maxsize=16)
def decode_layout(text: bytes) -> KvLayout:
    fields: dict[str, Any] = json.loads(text)
    groups = tuple(KvSpec(**{**group, "kind": KvKind(group["kind"])}) for group in fields.pop("groups"))
    return KvLayout(groups=groups, **fields)
