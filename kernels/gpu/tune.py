"""Times alternatives to the tables in `attention_tiles` (`python -m kernels.gpu.tune decode|prefill`), and prints the
best ones for each case, to be copied into the tables by hand. With `--deterministic`, it says which of them do not give
the bits of the current choice. The cases have 32 query heads and 8 KV heads, and blocks of 16 slots. A measurement
replays a CUDA graph over more layers than fit into L2. `--rehearse` runs only the current choice, at toy sizes.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator

import torch
import triton

from kernels.gpu import attention_tiles as tiles
from kernels.gpu.attention import E4M3, Attention, chip_of, launch, plan
from kernels.gpu.attention_tiles import Chip, Tiling

HEADS, KV_HEADS, BLOCK_SIZE = 32, 8, 16
CASES = {  # sequences, queries per sequence, context per sequence
    "decode": ((1, 1, 4096), (1, 1, 32_768), (16, 1, 4096), (32, 1, 4096), (64, 1, 4096), (256, 1, 4096)),
    "prefill": ((1, 2048, 6144), (1, 8192, 8192), (16, 512, 512)),
}
TOY = {"decode": ((2, 1, 40),), "prefill": ((2, 5, 21),)}
MORE_THAN_L2_BYTES = 512 << 20
WARPS = {16: (1, 2), 32: (2, 4), 64: (4, 8), 128: (8,)}
"""The numbers of warps for tiles of so many rows, in deterministic mode."""


def layers_of(case: tuple[int, int, int], args: argparse.Namespace, device: str) -> list[Attention]:
    """Returns the same call for each layer of an arena whose blocks are in random order."""
    sequences, q_len, context = case
    blocks = -(-context // BLOCK_SIZE)
    layer_bytes = sequences * blocks * 2 * KV_HEADS * BLOCK_SIZE * args.head_dim * (1 if args.fp8 else 2)
    num_layers = 1 if args.rehearse else min(32, -(-MORE_THAN_L2_BYTES // layer_bytes))
    shape = (sequences * blocks, num_layers, 2, KV_HEADS, BLOCK_SIZE, args.head_dim)
    arena = torch.randn(shape, device=device, dtype=torch.bfloat16).to(E4M3 if args.fp8 else torch.bfloat16)
    table = torch.randperm(sequences * blocks, device=device).int().view(sequences, blocks)
    lens = torch.full((sequences,), context, dtype=torch.int32, device=device)
    cu = torch.arange(sequences + 1, dtype=torch.int32, device=device) * q_len if q_len > 1 else None
    q = torch.randn(sequences * q_len, HEADS, args.head_dim, device=device, dtype=torch.bfloat16)
    options = (args.head_dim**-0.5, None, args.deterministic, 1.0, 1.0)
    caches = [(arena[:, i, 0], arena[:, i, 1]) for i in range(num_layers)]
    return [Attention(torch.empty_like(q), q, *pair, table, lens, cu, *options) for pair in caches]


def alternatives(a: Attention, chip: Chip) -> Iterator[tuple[Tiling, int]]:
    """Yields the tiling in the tables, and then the alternatives to it."""
    chosen, splits = plan(a, chip, None)
    yield chosen, splits
    if a.deterministic:  # the number of keys per step influences the bits
        every = ((rows, warps, stages) for rows in WARPS for warps in WARPS[rows] for stages in (2, 3))
        yield from ((Tiling(rows, chosen.tile, warps, stages), splits) for rows, warps, stages in every)
        return
    rows = (64, 128) if a.cu_seqlens_q is not None else (chosen.rows,)
    for choice in itertools.product(rows, (32, 64, 128), (4, 8), (2, 3, 5), (1, 2, 3, 4, 6)):
        tiling = Tiling(*choice)
        if a.cu_seqlens_q is not None:
            if tiling.programs_per_sm == 1:
                yield tiling, splits
        else:
            yield tiling, tiles.num_splits(tiling, a.num_seqs * a.num_kv_heads, a.max_keys, chip)


def time_ms(calls: Callable[[], object], device: str) -> float:
    if device == "cuda":
        return float(triton.testing.do_bench_cudagraph(calls, rep=40, return_mode="median"))
    start = time.perf_counter()
    calls()
    return 1e3 * (time.perf_counter() - start)


def tune(case: tuple[int, int, int], args: argparse.Namespace, device: str) -> None:
    layers = layers_of(case, args, device)
    timed: dict[tuple[int, int, int, int, int], tuple[float, bool]] = {}  # ms, and whether the bits are the first's
    expected: torch.Tensor | None = None
    for tiling, splits in alternatives(layers[0], chip_of(layers[0].q.device)):
        key = (tiling.rows, tiling.tile, tiling.num_warps, tiling.num_stages, splits)
        if key in timed:
            continue
        try:
            ms = time_ms(lambda t=tiling, s=splits: [launch(a, t, s) for a in layers], device) / len(layers)
        except triton.runtime.errors.OutOfResources:
            ms = float("inf")
        expected = layers[0].out.clone() if expected is None else expected
        timed[key] = ms, torch.equal(layers[0].out, expected)
        if args.rehearse:
            break
    print(f"{case}: rows, tile, warps, stages, splits; the first line is the current choice")
    for key, (ms, same) in [*itertools.islice(timed.items(), 1), *sorted(timed.items(), key=lambda item: item[1])[:5]]:
        print(f"  {key} {1e3 * ms:9.1f} us{'' if same or not args.deterministic else ', other bits'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=CASES)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--sequences", type=int, nargs="+", help="only the cases with so many sequences")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    for case in (TOY if args.rehearse else CASES)[args.kind]:
        if args.sequences and case[0] not in args.sequences:
            continue
        tune(case, args, "cuda" if torch.cuda.is_available() else "cpu")


if __name__ == "__main__":
    main()
