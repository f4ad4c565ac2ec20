"""How paged attention is cut into programs: tile, warps and stages by head dim and chip, splits by shapes.

Nothing has run on a GPU yet. The numbers are what the compiler makes of them (no spills, registers, shared memory:
`tests/kernels/gpu/test_compile_attention.py` holds them to it) and a model of bytes. `python -m kernels.gpu.tune`
measures the alternatives where there is a GPU.

Decode reads a K and V byte once for as many FLOP as the group is large, so what counts is bytes in flight. A step of 64
keys of 128 is 32 KiB; an SM needs some 25 KB (4.3 TB/s times about 0.8 us over 132 SMs, estimated). With 38 KiB and 126
registers x 128 threads four programs fit. Its rows beyond the group are padding: `tl.dot` wants 16.
Prefill is bound by the tensor cores: 128 rows on 8 warps use wgmma (sm_90) and tcgen05 (sm_100) and read keys once for
all of them; without these the same sums spill unless the tile is halved.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kernels.gpu.launch import power_of_2

PIECE = 512
"""Keys of a piece in deterministic mode. Bits depend on it."""
MAX_SPLITS = 64
"""In fast mode: the merge holds this many partial rows in registers (64 x 128 fp32 over 4 warps: 64 a thread)."""
MIN_SPLIT_KEYS = 128
"""In fast mode: a shorter split costs more to merge than it hides (estimated)."""
MAX_HEAD_DIM = 256


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
    num_stages: int = 3
    programs_per_sm: int = 1
    """How many fit on a multiprocessor at once (by registers, without a window), where splits are to fill them."""


# By columns a program holds, and whether K and V are fp8: these are widened in registers, and take more of them.
DECODE = {
    (64, False): Tiling(16, 128, 4, programs_per_sm=4),
    (128, False): Tiling(16, 64, 4, programs_per_sm=4),
    (256, False): Tiling(16, 32, 4, programs_per_sm=3),
    (64, True): Tiling(16, 128, 4, programs_per_sm=3),
    (128, True): Tiling(16, 64, 4, programs_per_sm=2),
    (256, True): Tiling(16, 32, 4, programs_per_sm=2),
}
# The same for every chip, decode and any chunk: below 64 rows sm_90 and sm_100 use mma.sync as sm_80 does.
DETERMINISTIC = {
    (64, False): Tiling(32, 64, 8),
    (128, False): Tiling(32, 64, 4),
    (256, False): Tiling(32, 32, 8),
    (64, True): Tiling(32, 64, 8),
    (128, True): Tiling(32, 64, 8),
    (256, True): Tiling(32, 32, 8),
}
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

# fp32 has no tensor cores to itself: every product is a multiply-add, and more rows would spill. In all modes.
FP32 = {(64, False): Tiling(16, 32, 8, 2), (128, False): Tiling(16, 32, 8, 2), (256, False): Tiling(16, 16, 8, 2)}


def width_of(head_dim: int) -> int:
    """Columns a program holds: 80 and 96 take 128 in registers, and load only the real ones."""
    return max(16, power_of_2(head_dim))


def _pick(table: dict[tuple[int, bool], Tiling], head_dim: int, group: int, fp8: bool) -> Tiling:
    chosen = table[max(64, width_of(head_dim)), fp8]
    return replace(chosen, rows=max(chosen.rows, power_of_2(group)))


def decode_tiling(head_dim: int, group: int, fp8: bool) -> Tiling:
    """`group`: query heads that share a KV head."""
    return _pick(DECODE, head_dim, group, fp8)


def deterministic_tiling(head_dim: int, group: int, fp8: bool) -> Tiling:
    return _pick(DETERMINISTIC, head_dim, group, fp8)


def fp32_tiling(head_dim: int, group: int) -> Tiling:
    """For queries in fp32 (on a chip; the interpreter takes the others, which it is to test)."""
    return _pick(FP32, head_dim, group, False)


def prefill_tiling(head_dim: int, group: int, fp8: bool, chip: Chip, max_q_len: int | None) -> Tiling:
    """Chunks of at most `max_q_len` that fit decode's rows use decode's."""
    decode = decode_tiling(head_dim, group, fp8)
    if max_q_len is not None and max_q_len * group <= decode.rows:
        return decode
    return _pick(PREFILL_WITH_WGMMA if 90 <= chip.cc < 120 else PREFILL, head_dim, group, fp8)


def num_splits(tiling: Tiling, programs: int, max_keys: int, chip: Chip) -> int:
    """Splits in fast mode, from shapes only. programs: sequences x KV heads; max_keys: what a block table row can hold.

    None from 80 % of the chip's places on (as FlashAttention-3 does), else as many as fill them. Lengths are not seen:
    one long context among many short ones is then read by one program for each KV head. Splits of at least so many keys
    wherever the table is wide would mend it, for a merge in every step; the benchmark's skewed batch is to decide.
    """
    places = chip.num_sms * tiling.programs_per_sm
    if programs >= 0.8 * places:
        return 1
    return max(1, min(-(-places // max(1, programs)), max_keys // MIN_SPLIT_KEYS, MAX_SPLITS))


def num_pieces(max_keys: int, window: int | None) -> int:
    """Splits in deterministic mode: the most pieces in which the last query of a sequence can see a key.

    For a table of 128 Ki keys that is 256 programs for each sequence and KV head, nearly all of which return at once
    when sequences are short, in graphs always; what that costs is to be measured.
    """
    whole = max(1, -(-max_keys // PIECE))
    return whole if window is None else min(whole, -(-window // PIECE) + 1)
