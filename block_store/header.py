"""Byte layout of an arena file: one fixed page, arrays of per-block fields, then the blocks. Knows bytes only.

0        fixed page: magic .. layout JSON (`FIXED`, then JSON up to 4096)
4096     generation u64[n] | digest u64[n] | prefix hash u8[n, 32] | writer slot u32[n] | state u8[n],
         each from a multiple of 64
data     u8[n, block_bytes] from a multiple of 2 MiB (huge-page friendly)
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

from block_store.errors import ArenaError
from common.types import KvKind, KvLayout, KvSpec

MAGIC = b"LOOSLEAF"
VERSION = 1
FIXED_BYTES = 4096
DATA_ALIGNMENT = 2 << 20
# magic, version, JSON length, num_blocks, block_bytes, data offset, arena id, layout fingerprint, rebuild count,
# run_id, dataset
FIXED = struct.Struct("<8sIIQQQ16s32sQ40s16s")


class HeaderState(IntEnum):
    """What the header says of a block. The ledger's states are finer; this is what can be known without Redis."""

    EMPTY = 0
    WRITING = 1
    SEALED = 2


@dataclass(frozen=True, slots=True)
class FixedHeader:
    """The fixed page, decoded."""

    num_blocks: int
    block_bytes: int
    data_offset: int
    arena_id: str
    layout_fingerprint: bytes
    rebuild_count: int
    run_id: str
    dataset: str
    layout: KvLayout

    def encode(self) -> bytes:
        text = encode_layout(self.layout)
        if FIXED.size + len(text) > FIXED_BYTES:
            raise ArenaError(f"KV layout with {len(self.layout.groups)} groups does not fit into the arena's header")
        fixed = FIXED.pack(
            MAGIC, VERSION, len(text), self.num_blocks, self.block_bytes, self.data_offset, self.arena_id.encode(),
            self.layout_fingerprint, self.rebuild_count, self.run_id.encode(), self.dataset.encode(),
        )  # fmt: skip
        return fixed + text

    @classmethod
    def decode(cls, page: bytes, path: str) -> FixedHeader:
        if page[: len(MAGIC)] != MAGIC:
            raise ArenaError(f"{path} is not an arena")
        _, version, text_len, blocks, size, offset, arena, layout, rebuilds, run_id, dataset = FIXED.unpack_from(page)
        if version != VERSION:
            raise ArenaError(f"{path} has arena version {version}, this program reads {VERSION}")
        return cls(
            blocks, size, offset, arena.decode(), layout, rebuilds, run_id.rstrip(b"\0").decode(),
            dataset.rstrip(b"\0").decode(), decode_layout(page[FIXED.size : FIXED.size + text_len]),
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
    """Size of the whole file."""
    return ArenaOffsets.of(num_blocks).data + num_blocks * block_bytes


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def encode_layout(layout: KvLayout) -> bytes:
    return json.dumps(asdict(layout), sort_keys=True, separators=(",", ":")).encode()


def decode_layout(text: bytes) -> KvLayout:
    fields: dict[str, Any] = json.loads(text)
    groups = tuple(KvSpec(**{**group, "kind": KvKind(group["kind"])}) for group in fields.pop("groups"))
    return KvLayout(groups=groups, **fields)
