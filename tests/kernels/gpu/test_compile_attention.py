"""Paged attention compiled for sm_80, sm_90 and sm_100 with the tiles of real launches: no spills, enough shared
memory, wide loads, tensor cores, and the same arithmetic in decode and prefill where bits must be equal. With
COMPILE_ALL=1, compiles all combinations of kernel, head dim, dtype, window and chip (some minutes). Otherwise, compiles
each head dim, dtype and option at least once, and head dim 128 in bf16 in all combinations.
"""

from __future__ import annotations

import itertools
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from kernels.gpu import attention_tiles as tiles
from kernels.gpu.attention_tiles import Chip, Tiling
from kernels.gpu.compile import SHARED_LIMIT_BYTES, TMEM_COLUMNS, Case, Resources

CHIPS, HEAD_DIMS = (80, 90, 100), (64, 80, 96, 128, 256)
KINDS = ("decode", "split", "prefill", "short", "det_decode", "det_split", "det_prefill")
GROUP = 4
MODULE = "kernels.gpu.attention_kernels"
REGISTERS_PER_SM = 65_536

Compiled = list[tuple[Case, Resources]]


def _types(dtype: str, cache: str) -> dict[str, str]:
    return {
        **dict.fromkeys(("out", "q"), f"*{dtype}:16"),
        **dict.fromkeys(("key_cache", "value_cache"), f"*{cache}:16"),
        **dict.fromkeys(("block_table", "context_lens", "cu_seqlens_q"), "*i32"),
        **dict.fromkeys(("partial_acc", "partial_max", "partial_sum"), "*fp32:16"),
        "sinks": "*fp32",
        **dict.fromkeys(("scale_log2", "cap_log2", "value_scale"), "fp32"),
        **dict.fromkeys(("num_seqs", "num_splits", "window", "table_row"), "i32"),
        **dict.fromkeys(("q_row", "q_head", "out_row", "out_head", "kv_block", "kv_head", "kv_slot"), "i32:16"),
    }


def _tiling(kind: str, head_dim: int, fp8: bool, cc: int, dtype: str) -> Tiling:
    if dtype == "fp32":
        return tiles.fp32_tiling(head_dim, GROUP)
    if kind.startswith("det"):
        return tiles.deterministic_tiling(head_dim, GROUP, fp8, Chip(cc, 132))
    if kind in ("decode", "split"):
        return tiles.decode_tiling(head_dim, GROUP, fp8)
    return tiles.prefill_tiling(head_dim, GROUP, fp8, Chip(cc, 132), 4 if kind == "short" else None)


def attention_case(
    kind: str, head_dim: int, dtype: str, cache: str, windowed: bool, cc: int, *, extras: bool = False
) -> Case:
    """Returns the variant for a launch of this kind. With `extras`, it has softcap and sinks."""
    tiling = _tiling(kind, head_dim, cache != dtype, cc, dtype)
    varlen, direct = kind.endswith(("prefill", "short")), not kind.endswith("split")
    constexprs: dict[str, Any] = {
        "GROUP": GROUP, "HEAD_DIM": head_dim, "WIDTH": tiles.width_of(head_dim), "BLOCK_SIZE": 16,
        "ROWS": tiling.rows, "TILE": tiling.tile, "PIECE": tiles.PIECE if kind.startswith("det") else 0,
        "VARLEN": varlen, "DIRECT": direct, "WINDOWED": windowed, "WIDE": False,
        "CAPPED": extras, "SINKS": extras,
    }  # fmt: skip
    constexprs |= {} if extras else {"sinks": None}
    constexprs |= {} if varlen else {"cu_seqlens_q": None}
    constexprs |= dict.fromkeys(("partial_acc", "partial_max", "partial_sum")) if direct else {}
    options = (cc, tiling.num_warps, tiling.num_stages, not constexprs["PIECE"])
    return Case(f"{MODULE}:attention_kernel", _types(dtype, cache), constexprs, *options)


def merge_case(piece: int, splits: int, head_dim: int, cc: int) -> Case:
    width = tiles.width_of(head_dim)
    constexprs: dict[str, Any] = {"HEAD_DIM": head_dim, "WIDTH": width, "SPLITS": splits, "TILE": 64, "PIECE": piece}
    return Case(
        f"{MODULE}:merge_kernel",
        _types("bf16", "bf16"),
        {**constexprs, "WINDOWED": False, "SINKS": False, "sinks": None},
        cc,
        4,
        3,
        not piece,
    )


def _all_variants() -> list[tuple[str, int, str, str, bool, int]]:
    types = (("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "fp8e4nv"))
    every = itertools.product(KINDS, HEAD_DIMS, types, (False, True), CHIPS)
    return [(k, d, *t, w, cc) for k, d, t, w, cc in every if t[1] != "fp8e4nv" or cc >= 89]


def _some_variants() -> list[tuple[str, int, str, str, bool, int]]:
    main = ("split", "prefill", "det_split", "det_prefill")
    return [
        *((kind, 128, "bf16", "bf16", False, cc) for kind in main for cc in CHIPS),
        *((kind, 128, "bf16", "fp8e4nv", False, 90) for kind in main),
        *((kind, 128, "bf16", "bf16", True, 90) for kind in ("decode", "prefill", "short", "det_decode")),
        *((kind, d, "bf16", "bf16", False, 90) for kind in ("split", "prefill") for d in (64, 96)),
        ("split", 80, "fp16", "fp16", False, 80),
        ("split", 256, "bf16", "bf16", False, 90),
        ("det_prefill", 256, "bf16", "bf16", False, 90),
        ("prefill", 256, "fp16", "fp16", False, 80),
    ]


@pytest.fixture(scope="module")
def compiled(compile_cases: Callable[[Iterable[Case]], list[Resources]]) -> Compiled:
    variants = _all_variants() if os.environ.get("COMPILE_ALL") == "1" else _some_variants()
    cases = [attention_case(*variant) for variant in variants]
    cases += [merge_case(piece, splits, 128, cc) for piece, splits in ((0, 64), (512, 1)) for cc in CHIPS]
    cases.append(merge_case(0, 64, 256, 90))
    cases += [
        attention_case(kind, 128, "bf16", "bf16", kind == "decode", 90, extras=True)
        for kind in ("decode", "split", "prefill", "det_split", "det_prefill")
    ]
    return list(zip(cases, compile_cases(cases), strict=True))


def _attention(compiled: Compiled, **wanted: Any) -> Compiled:
    found = [pair for pair in compiled if wanted.items() <= (pair[0].constexprs | {"cc": pair[0].cc}).items()]
    assert found, wanted
    return found


def test_nothing_spills_and_everything_fits(compiled: Compiled) -> None:
    """Except for long chunks in deterministic mode on sm_90. An H100 computes them in half of the time that the tile of
    32 rows takes, which spills nothing.
    """
    for case, used in compiled:
        long = case.constexprs.get("PIECE") and case.constexprs.get("VARLEN") and case.cc == 90
        assert used.spill_bytes <= (96 if long else 0), case
        assert used.shared_bytes <= SHARED_LIMIT_BYTES[case.cc], case
        assert used.tmem_columns <= TMEM_COLUMNS, case
        assert used.registers * case.num_warps * 32 <= REGISTERS_PER_SM, case


def test_as_many_decode_programs_fit_as_splits_are_chosen_for(compiled: Compiled) -> None:
    for case, used in _attention(compiled, VARLEN=False, PIECE=0, WINDOWED=False):
        fp8 = "fp8" in case.signature["key_cache"]
        expected = tiles.decode_tiling(int(case.constexprs["HEAD_DIM"] or 0), GROUP, fp8).programs_per_sm
        by_registers = REGISTERS_PER_SM // (-(-used.registers // 8) * 8 * case.num_warps * 32)  # in units of eight
        assert min(by_registers, SHARED_LIMIT_BYTES[case.cc] // used.shared_bytes) >= expected, case


def test_keys_and_values_come_in_16_byte_pieces(compiled: Compiled) -> None:
    """Only block ids are copied in units of 4 bytes. (Triton lays out fp8 values for the product in units
    of 8 bytes.)
    """
    for case, used in _attention(compiled, WIDE=False):
        fp8 = "fp8" in case.signature["key_cache"]
        sizes = re.findall(r"cp\.async\.c[ag]\.shared\.global\s.*?, 0x([0-9a-f]+)", used.ptx)
        tile_bytes = int(case.constexprs["TILE"] or 0) * int(case.constexprs["WIDTH"] or 0)
        copied = sizes.count("10") * 16 * case.num_warps * 32
        assert copied >= (tile_bytes if fp8 else 2 * 2 * tile_bytes), case  # K and V; with fp8, only K
        assert set(sizes) <= ({"10", "8", "4"} if fp8 else {"10", "4"}), case


def test_each_chip_uses_its_tensor_cores(compiled: Compiled) -> None:
    for case, used in _attention(compiled, WIDE=False):
        rows = int(case.constexprs["ROWS"] or 0)
        wide = {90: "wgmma.mma_async", 100: "tcgen05.mma"}.get(case.cc, "mma.sync")
        assert (wide if rows >= 64 else "mma.sync") in used.ptx, case
        if rows < 64:
            assert "wgmma" not in used.ptx and "tcgen05.mma" not in used.ptx, case


def _arithmetic(used: Resources) -> list[str]:
    """Returns every product and reduction, with its layouts in full."""
    named = dict(re.findall(r"^(#\w+) = (#ttg\..*)$", used.ttgir, re.M))
    found = re.findall(r"(tt\.dot .*|\"tt\.reduce\".*|\}\) : \(tensor.*)", used.ttgir)
    lines = []
    for line in found:
        line = re.sub(r"%[\w#:]+", "%", re.sub(r" loc\(.*?\)", "", line))
        lines.append(re.sub(r"#(?:mma|blocked|shared|smem)\d*\b", lambda name: named.get(name[0], name[0]), line))
    return sorted(set(lines))


def test_decode_and_prefill_compute_alike_in_deterministic_mode(compiled: Compiled) -> None:
    """With the same products, reductions and layouts, sums have the same order."""
    alike: dict[tuple[Any, ...], dict[bool, list[str]]] = defaultdict(dict)
    for case, used in _attention(compiled, PIECE=tiles.PIECE, WIDE=False):
        key = (case.cc, case.signature["key_cache"], case.constexprs["HEAD_DIM"], case.constexprs["WINDOWED"])
        alike[key][bool(case.constexprs["VARLEN"])] = _arithmetic(used)
    for case, used in _attention(compiled, PIECE=tiles.PIECE):
        assert not re.search(r"\bfma\.", used.ptx), case  # a * b + c is always rounded twice
    both = {key: found for key, found in alike.items() if len(found) == 2}
    assert len(both) >= len(CHIPS)
    for key, found in both.items():
        assert found[False] == found[True] != [], key


def test_fp32_does_not_spill_and_computes_alike(compile_cases: Callable[[Iterable[Case]], list[Resources]]) -> None:
    """fp32 does not use tensor cores, because it serves for comparisons with other implementations."""
    cases = [attention_case(kind, 128, "fp32", "fp32", False, 90) for kind in ("det_split", "det_prefill")]
    decode, prefill = compile_cases(cases)
    assert decode.spill_bytes == prefill.spill_bytes == 0
    assert _arithmetic(decode) == _arithmetic(prefill) != []
    assert "mma" not in decode.ptx
