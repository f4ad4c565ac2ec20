"""Tile sizes, warps, stages and key splits of paged attention. They depend on the mode, shapes, dtypes, the window, the
longest chunk and the chip.

The tables follow from the compiler's reports of registers, spills and shared memory (checked by
`tests/kernels/gpu/test_compile_attention.py`) and from a model of memory traffic. On an H100, decode of 64 sequences
reads 3.0 TB/s, like FlashAttention-3. `python -m kernels.gpu.tune` measures the alternatives on a machine with a GPU.

Decode performs about as many FLOP per byte of K and V as the group has heads, so the number of bytes in flight matters
most. An SM needs about 25 KB in flight (an estimate: 4.3 TB/s times 0.8 us, divided by 132 SMs). A step of 64 keys with
128 bf16 values each reads 32 KiB of K and V. Rows beyond the group are padding, because `tl.dot` needs 16 rows. Prefill
is bound by the tensor cores. With 128 rows on 8 warps, it uses wgmma (sm_90) or tcgen05 (sm_100), and reads keys once
for all rows. Without these instructions, the same sums spill registers unless the tile is halved.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kernels.gpu.launch import power_of_2

PIECE = 512
"""Number of keys per piece in deterministic mode. It influences the bits of results."""
MAX_SPLITS = 64
"""Maximum number of splits in fast mode, because the merge keeps a partial row of every split in registers (64 x 128
fp32 over 4 warps: 64 per thread).
"""
MIN_SPLIT_KEYS = 128
"""Minimum number of keys per split in fast mode. Merging a shorter split is estimated to cost more time than the split
saves.
"""
MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class Chip:
    cc: int
    """Compute capability as a single number: 80, 90, 100."""
    num_sms: int


@dataclass(frozen=True, slots=True)
class Tiling:
    """A choice of tile sizes and launch parameters. `rows` and `tile` are powers of two."""

    rows: int
    """Rows of scores per program: queries times the heads that share a KV head."""
    tile: int
    """Keys per step."""
    num_warps: int
    num_stages: int = 3
    programs_per_sm: int = 1
    """Number of programs that fit on a multiprocessor at the same time, by registers and without a window."""


# Keys: the number of columns that a program holds, and whether K and V are fp8, which needs more registers.
DECODE = {
    (64, False): Tiling(16, 128, 4, programs_per_sm=4),
    (128, False): Tiling(16, 64, 4, programs_per_sm=4),
    (256, False): Tiling(16, 32, 4, programs_per_sm=3),
    (64, True): Tiling(16, 128, 4, programs_per_sm=3),
    (128, True): Tiling(16, 64, 4, programs_per_sm=2),
    (256, True): Tiling(16, 32, 4, programs_per_sm=2),
}
# Used for decode and for any chunk. With fewer than 64 rows, sm_90 and sm_100 use mma.sync, like sm_80.
DETERMINISTIC = {
    (64, False): Tiling(32, 64, 8),
    (128, False): Tiling(32, 64, 4),
    (256, False): Tiling(32, 32, 8),
    (64, True): Tiling(32, 64, 8),
    (128, True): Tiling(32, 64, 8),
    (256, True): Tiling(32, 32, 8),
}
# Used instead on sm_90, which computes 64 rows with wgmma: on an H100, a chunk takes about half of the time of 32 rows.
DETERMINISTIC_ON_HOPPER = DETERMINISTIC | {(64, False): Tiling(64, 64, 4, 2), (128, False): Tiling(64, 64, 4, 2)}
PREFILL_WITH_WGMMA = {
    (64, False): Tiling(128, 128, 8),
    (128, False): Tiling(128, 64, 8),
    (256, False): Tiling(128, 32, 8),
    (64, True): Tiling(128, 128, 8),
    (128, True): Tiling(128, 64, 8),
    (256, True): Tiling(64, 32, 8),
}
PREFILL = {
    (64, False): Tiling(128, 64, 8),
    (128, False): Tiling(128, 32, 8),
    (256, False): Tiling(64, 32, 8),
    (64, True): Tiling(128, 64, 8),
    (128, True): Tiling(128, 32, 8),
    (256, True): Tiling(64, 32, 8),
}

# Used in all modes. fp32 does not use tensor cores: every product is a multiply-add, and more rows would spill.
FP32 = {(64, False): Tiling(16, 32, 8, 2), (128, False): Tiling(16, 32, 8, 2), (256, False): Tiling(16, 16, 8, 2)}


def width_of(head_dim: int) -> int:
    """Returns the number of columns that a program holds in registers, which is a power of two. Only `head_dim` columns
    are loaded.
    """
    return max(16, power_of_2(head_dim))


def _pick(table: dict[tuple[int, bool], Tiling], head_dim: int, group: int, fp8: bool) -> Tiling:
    chosen = table[max(64, width_of(head_dim)), fp8]
    return replace(chosen, rows=max(chosen.rows, power_of_2(group)))


def decode_tiling(head_dim: int, group: int, fp8: bool) -> Tiling:
    """Returns the tiling for decode. `group` is the number of query heads that share a KV head."""
    return _pick(DECODE, head_dim, group, fp8)


def deterministic_tiling(head_dim: int, group: int, fp8: bool, chip: Chip) -> Tiling:
    return _pick(DETERMINISTIC_ON_HOPPER if chip.cc == 90 else DETERMINISTIC, head_dim, group, fp8)


def fp32_tiling(head_dim: int, group: int) -> Tiling:
    """Returns the tiling for fp32 queries on a chip. Triton's interpreter does not use this tiling, so that tests run
    the tilings for bf16.
    """
    return _pick(FP32, head_dim, group, False)


def prefill_tiling(head_dim: int, group: int, fp8: bool, chip: Chip, max_q_len: int | None) -> Tiling:
    """Returns the tiling for prefill. This is the tiling for decode if chunks of up to `max_q_len` queries fit into its
    rows.
    """
    decode = decode_tiling(head_dim, group, fp8)
    if max_q_len is not None and max_q_len * group <= decode.rows:
        return decode
    return _pick(PREFILL_WITH_WGMMA if 90 <= chip.cc < 120 else PREFILL, head_dim, group, fp8)


def num_splits(tiling: Tiling, programs: int, max_keys: int, chip: Chip) -> int:
    """Returns the number of splits in fast mode, which depends only on shapes and the chip.

    `programs` is the number of sequences times the number of KV heads, and `max_keys` is the capacity of a row of the
    block table. Keys are not split if the programs are at least 80 % of those that fit on the chip at the same time (as
    in FlashAttention-3). Otherwise, there are as many splits as still fit on the chip at the same time, within the
    limits MAX_SPLITS and MIN_SPLIT_KEYS. Context lengths are unknown here, so a single program per KV head may have to
    read a long context among many short ones.
    """
    places = chip.num_sms * tiling.programs_per_sm
    if programs >= 0.8 * places:
        return 1
    return max(1, min(places // max(1, programs), max_keys // MIN_SPLIT_KEYS, MAX_SPLITS))


def num_pieces(max_keys: int, window: int | None) -> int:
    """Returns the number of splits in deterministic mode, which is the largest number of pieces in which the last query
    of a sequence can see a key.

    A table of 128 Ki keys needs 256 programs per sequence and KV head. Nearly all of them return at once if sequences
    are short. This cost has not been measured.
    """
    whole = max(1, -(-max_keys // PIECE))
    return whole if window is None else min(whole, -(-window // PIECE) + 1)
