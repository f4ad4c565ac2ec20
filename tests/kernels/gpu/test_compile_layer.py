"""The kernels of a layer compiled for sm_80, sm_90 and sm_100: no spills, enough shared memory, wide loads and
stores."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from kernels.gpu import copy_blocks, linear, rms_norm, sampling, silu_mul, write_blocks
from kernels.gpu.compile import SHARED_LIMIT_BYTES, Case, Resources
from kernels.gpu.launch import power_of_2, warps_for

CHIPS = (80, 90, 100)
HEADS = ((32, 8, 128, 128), (12, 12, 64, 0), (24, 8, 96, 96), (32, 32, 80, 32), (8, 1, 256, 256))
VOCAB = 128_256
Compiled = list[tuple[Case, Resources]]


def _case(kernel: str, types: str, constexprs: dict[str, Any], cc: int, **options: int) -> Case:
    """Returns a case. `types` has a word "name=type" for each run-time parameter."""
    return Case(f"kernels.gpu.{kernel}", dict(word.split("=") for word in types.split()), constexprs, cc, **options)


def _rms_norm(width: int, dtype: str, residual: bool, cc: int) -> Case:
    variant = rms_norm.constexprs(width, residual)
    pointers = " ".join(f"{name}_ptr=*{dtype}:16" for name in ("out", "summed", "x", "residual", "weight"))
    numbers = "num_rows=i32 eps=fp32 x_outer=i32:16 x_head=i32:16 residual_outer=i32:16 residual_head=i32:16"
    heads = {"heads": 1} if width > 256 else {}
    types = f"{pointers} {numbers} {'' if heads else 'heads=i32'}"
    warps = warps_for(variant["ROWS"] * variant["COLS"])
    return _case("rms_norm:rms_norm_kernel", types, {**variant, **heads}, cc, num_warps=warps)


def _silu_mul(dtype: str, cc: int) -> Case:
    tile = silu_mul.tile_for(14_336)
    types = f"out_ptr=*{dtype}:16 x_ptr=*{dtype}:16 width=i32:16 x_row=i32:16"
    return _case("silu_mul:silu_mul_kernel", types, {"TILE": tile, "GELU": False}, cc, num_warps=warps_for(tile))


def _linear(tile: linear.Tile, dtype: str, bias: bool, cc: int) -> Case:
    pointers = " ".join(f"{name}_ptr=*{dtype}:16" for name in ("out", "x", "weight", "bias"))
    types = f"{pointers} num_rows=i32 out_features=i32:16 in_features=i32:16 x_row=i32:16 weight_row=i32:16"
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return _case("linear:linear_kernel", types, linear.constexprs(tile, bias), cc, **options)


def _write_blocks(heads: int, dim: int, rotary: int, dtype: str, cache: str, cc: int) -> Case:
    tensors = " ".join(f"{name}_ptr=*{dtype}:16" for name in ("q", "k", "v"))
    caches = f"key_ptr=*{cache}:16 value_ptr=*{cache}:16 positions_ptr=*i64:16 slots_ptr=*i64:16 cos_sin_ptr=*fp32:16"
    numbers = "num_heads=i32 num_kv_heads=i32 num_slots=i32:16 block_size=i32:16 max_pos=i32 k_scale=fp32 v_scale=fp32"
    names = [f"{t}_{step}" for t in "qkv" for step in ("token", "head")]
    names += [f"{t}_{step}" for t in ("key", "value") for step in ("block", "head", "slot")]
    types = f"{tensors} {caches} {numbers} {' '.join(f'{name}=i32:16' for name in names)}"
    variant = write_blocks.constexprs(heads, dim, rotary, cache != dtype)
    return _case(
        "write_blocks:write_blocks_kernel", types, variant, cc, num_warps=write_blocks.warps(variant), fp_fusion=False
    )


def _copy_blocks(block_bytes: int, unit_bytes: int, dst_ids: bool, src_ids: bool, cc: int) -> Case:
    variant, word = copy_blocks.constexprs(block_bytes, unit_bytes), "i32:16" if unit_bytes == 16 else "u8"
    pointers = f"dst_ptr=*{word} src_ptr=*{word} dst_ids_ptr=*i64:16 src_ids_ptr=*i64:16"
    types = f"{pointers} num_dst=i32 num_src=i32 units=i32 dst_row=i32 src_row=i32"
    constants = {**variant, "HAS_DST_IDS": dst_ids, "HAS_SRC_IDS": src_ids}
    return _case("copy_blocks:copy_blocks_kernel", types, constants, cc, num_warps=copy_blocks.warps(variant))


def _sampling(cc: int) -> list[Case]:
    tile = sampling.tile_for(VOCAB)
    both, tiles = {"TILE": tile, "TILES": power_of_2(-(-VOCAB // tile))}, {"TILE": tile}
    row = "vocab=i32:16 logits_ptr=*fp32:16 logits_row=i32:16"
    sums = "mass_ptr=*fp64:16 best_ptr=*i64:16 temperature_ptr=*fp32:16 weight_ptr=*fp32:16"
    more = "x_ptr=*fp32:16 count_ptr=*i32:16"
    columns = "seeds_ptr=*i64:16 samples_ptr=*i64:16 positions_ptr=*i64:16 vocab=i32:16 tiles=i32"
    results = "chosen_ptr=*fp32:16 rank_ptr=*i64:16 ids_ptr=*i64:16 top_ptr=*fp32:16 token_ids_ptr=*i64:16 k=i32"
    kernels: list[tuple[str, str, dict[str, Any]]] = [
        ("best_kernel", f"best_ptr=*i64:16 {row}", tiles),
        ("weigh_kernel", f"{sums} {more} min_p_ptr=*fp32:16 {row}", both),
        ("filter_kernel", f"{sums} {more} top_k_ptr=*i64:16 top_p_ptr=*fp32:16 vocab=i32:16 tiles=i32", both),
        ("draw_kernel", f"{sums} out_ptr=*i64:16 {columns}", both),
        ("log_softmax_top_kernel", f"{results} {row}", tiles),
    ]
    options = {"num_warps": sampling.OPTIONS["num_warps"], "fp_fusion": sampling.OPTIONS["enable_fp_fusion"]}
    return [_case(f"sampling_kernels:{n}", types, constants, cc, **options) for n, types, constants in kernels]


def _cases(cc: int) -> list[Case]:
    dtypes = ("bf16", "fp16")
    copies = ((2 << 20, 16, True, True), (2 << 20, 16, False, True), (1 << 20, 16, True, False), (1000, 1, True, True))
    return [
        *(_rms_norm(width, "bf16", residual, cc) for width in (128, 4096, 8192) for residual in (False, True)),
        _rms_norm(4096, "fp16", True, cc),
        *(_silu_mul(dtype, cc) for dtype in dtypes),
        *(_linear(linear.fixed_tile(out_features), "bf16", False, cc) for out_features in (4096, 14_336, 28_672)),
        *(_linear(tile, "bf16", False, cc) for tile in linear.TILES),
        *(_linear(tile, "fp16", True, cc) for tile in linear.TILES[-2:]),
        *(_write_blocks(heads, d, rotary, "bf16", "bf16", cc) for heads, _, d, rotary in HEADS),
        _write_blocks(32, 128, 128, "fp16", "fp16", cc),
        *([_write_blocks(32, 128, 128, "bf16", "fp8e4nv", cc)] if cc >= 90 else []),  # requires sm_89 or later
        *(_copy_blocks(*copy, cc) for copy in copies),
        *_sampling(cc),
    ]


@pytest.fixture(scope="module")
def compiled(compile_cases: Callable[[Iterable[Case]], list[Resources]]) -> Compiled:
    """All compiled cases for all chips."""
    cases = [case for cc in CHIPS for case in _cases(cc)]
    return list(zip(cases, compile_cases(cases), strict=True))


def _of(compiled: Compiled, *kernels: str) -> Compiled:
    found = [(case, used) for case, used in compiled if case.kernel.partition(":")[2] in kernels]
    assert len(found) >= len(CHIPS) * len(kernels)
    return found


def test_nothing_spills_and_everything_fits(compiled: Compiled) -> None:
    for case, used in compiled:
        assert used.spill_bytes == 0, case
        assert used.shared_bytes <= SHARED_LIMIT_BYTES[case.cc], case
        assert used.registers * case.num_warps * 32 <= 65_536, case  # the registers of a multiprocessor


def test_blocks_are_copied_in_16_byte_words(compiled: Compiled) -> None:
    for case, used in _of(compiled, "copy_blocks_kernel"):
        for what in ("ld", "st"):
            data = [kind for kind in re.findall(rf"{what}\.global(\S*)", used.ptx) if not kind.endswith("b64")]  # ids
            wide = [kind for kind in data if kind.endswith(".v4.b32")]
            assert len(wide) == (8 if case.constexprs["UNIT"] == 4 else 0), case  # 32 KiB over 256 threads
            assert len(data) == len(wide) or case.constexprs["UNIT"] == 1, case


def test_rows_are_read_and_written_in_16_byte_words(compiled: Compiled) -> None:
    kernels = ("rms_norm_kernel", "silu_mul_kernel", "write_blocks_kernel", "weigh_kernel", "filter_kernel")
    for case, used in _of(compiled, *kernels):
        assert re.search(r"ld\.global\S*\.v4\.b32", used.ptx), case
        if "fp8" in str(case.signature):  # eight elements are 8 bytes
            continue
        assert re.search(r"st\.global\S*\.v4\.b32", used.ptx), case
        if case.constexprs.get("DIM") in (64, 128, 256):  # for other dims, half of the dim is not a power of two
            assert not re.search(r"(ld|st)\.global\S*\.(v2\.b32|b16|v2\.b16|v4\.b16)", used.ptx), case


def test_linear_streams_its_tiles_into_the_tensor_cores(compiled: Compiled) -> None:
    instruction = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
    for case, used in _of(compiled, "linear_kernel"):
        few_rows = case.constexprs["BLOCK_M"] < 64  # too few for the instructions of a warp group
        assert ("mma.sync" if few_rows else instruction[case.cc]) in used.ptx, case
        assert re.search(r"cp\.async\.c[ag]\.shared\.global \[[^\]]*\], \[[^\]]*\], 0x10", used.ptx), case


def test_sampling_fuses_only_what_is_written_so(compiled: Compiled) -> None:
    """2^x has six fused operations, for one or two tokens each. Its argument is a separate product, as on the CPU."""
    for case, used in _of(compiled, "weigh_kernel", "log_softmax_top_kernel"):
        pairs = len(re.findall(r"fma\.rn\.f32x2", used.ptx))
        singles = len(re.findall(r"fma\.rn\.f32\s", used.ptx))
        assert 2 * pairs + singles == 6 * case.constexprs["TILE"] // (32 * case.num_warps), case
