"""How paged attention is cut into programs: tile, warps and stages by head dim and chip, splits by shapes.

Where the numbers come from: nothing has run on a GPU yet. They are what the compiler makes of the choices (registers,
shared memory, no spills; `tests/kernels/gpu/test_compile_attention.py` holds them to it) and a model of bytes:
`python -m kernels.gpu.tune` measures the alternatives where there is a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kernels.gpu.launch import power_of_2

PIECE = 512
"""Keys of a piece in deterministic mode. The same for every chip and head dim: bits depend on it."""
MAX_SPLITS = 64
"""In fast mode: the merge holds this many partial rows in registers (64 x 128 fp32 over 4 warps: 64 a thread)."""
MIN_SPLIT_KEYS = 128
"""In fast mode: below this a split costs more to merge (a read and a write of head_dim fp32) than it hides."""


@dataclass(frozen=True, slots=True)
class Chip:
    cc: int
    """Compute capability as one number: 80, 90, 100."""
    num_sms: int


@dataclass(frozen=True, slots=True)
class Tiling:
    """One choice. `rows` and `tile` are powers of two."""

    rows: int
    """Rows of scores of a program: queries times the heads that share a KV head."""
    tile: int
    """Keys of a step."""
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1
    """How many fit on a multiprocessor at once; splits are chosen to fill these places."""


def width_of(head_dim: int) -> int:
    """Columns a program holds: 80 and 96 take 128 in registers, and load only the real ones."""
    return max(16, power_of_2(head_dim))


def decode_tiling(head_dim: int, group: int) -> Tiling:
    """Decode reads each K and V byte once for 2 x group FLOP a byte, so what counts is bytes in flight.

    A step of 64 keys of 128 is 32 KiB, and an SM needs some 25 KB in flight (4.3 TB/s x about 0.8 us / 132, estimated):
    two programs would do, four fit (38 KiB and 123 registers x 128 threads each), 528 on an H200. Wider heads halve the
    tile, narrower ones double it. The rows beyond the group are padding for `tl.dot`, whose least is 16.
    """
    rows = max(16, power_of_2(group))
    tile = max(32, min(128, 64 * 128 // width_of(head_dim)))
    return Tiling(rows, tile, num_warps=4, num_stages=3, programs_per_sm=4)


def prefill_tiling(head_dim: int, group: int, chip: Chip, max_q_len: int | None) -> Tiling:
    """Prefill is bound by the tensor cores: 128 rows on 8 warps use wgmma (tcgen05) with the sums in registers.

    On sm_80, without either, 64 rows a program keep them from spilling. Chunks that fit decode's rows use decode's.
    """
    decode = decode_tiling(head_dim, group)
    if max_q_len is not None and max_q_len * group <= decode.rows:
        return decode
    rows = max(128 if chip.cc >= 90 else 64, power_of_2(group))
    return Tiling(rows, 64 if width_of(head_dim) <= 128 else 32, num_warps=8 if chip.cc >= 90 else 4, num_stages=3)


def deterministic_tiling(head_dim: int, group: int) -> Tiling:
    """The same for decode, every chunk and every chip. Below 64 rows sm_90 and sm_100 use mma.sync, as sm_80 does."""
    decode = decode_tiling(head_dim, group)
    return replace(decode, rows=max(32, decode.rows), tile=min(64, decode.tile))


def num_splits(tiling: Tiling, programs: int, max_keys: int, chip: Chip) -> int:
    """Splits in fast mode, from shapes only. programs: sequences x KV heads; max_keys: what a block table row can hold.

    No splits from 80 % of the chip's places on (as FlashAttention-3 does), else as many as fill them.
    """
    places = chip.num_sms * tiling.programs_per_sm
    if programs >= 0.8 * places:
        return 1
    return max(1, min(-(-places // max(1, programs)), max_keys // MIN_SPLIT_KEYS, MAX_SPLITS))


def num_pieces(max_keys: int, window: int | None) -> int:
    """Splits in deterministic mode: the most pieces in which the last query of a sequence can see a key."""
    whole = -(-max_keys // PIECE)
    return max(1, whole if window is None else min(whole, -(-window // PIECE) + 1))
