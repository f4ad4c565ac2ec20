"""Times the tiles of `linear` and alternatives to them (`python -m kernels.gpu.tune_linear`), and says which of them do
not give the bits of the first one. The weights are those of Llama-3-8B. `--rehearse` runs the tiles at toy sizes on the
CPU under Triton's interpreter.
"""

from __future__ import annotations

import argparse

import torch
import triton
from torch import Tensor

from kernels.gpu.linear import TILES, Tile, linear, tile_of
from kernels.gpu.tune import time_ms

WEIGHTS = ((4096, 4096), (28_672, 4096), (4096, 14_336))
ROWS = (1, 64, 512, 4096)
ALTERNATIVES = tuple(
    Tile(*sizes)
    for sizes in (
        (64, 32, 64, 4, 4), (64, 64, 64, 4, 4), (64, 128, 64, 4, 4), (64, 32, 64, 4, 6), (64, 64, 64, 4, 6),
        (16, 64, 128, 4, 4), (64, 256, 64, 4, 4), (128, 128, 64, 4, 4), (128, 256, 64, 8, 3), (128, 256, 64, 8, 4),
    )
)  # fmt: skip
MORE_THAN_L2_BYTES = 256 << 20


def tune(num_rows: int, weights: list[Tensor], device: str) -> None:
    """Prints the time of each tile, slowest last."""
    g = torch.Generator(device).manual_seed(num_rows)
    dtype = weights[0].dtype
    x = torch.randn(num_rows, weights[0].shape[1], device=device, generator=g, dtype=torch.float32).to(dtype)
    found: list[tuple[float, str]] = []
    first = linear(x, weights[0], tile=TILES[0])
    for tile in (*TILES, *ALTERNATIVES):
        try:
            same = torch.equal(linear(x, weights[0], tile=tile), first)
            ms = time_ms(lambda t=tile: [linear(x, w, tile=t) for w in weights], device) / len(weights)
        except triton.runtime.errors.OutOfResources:
            continue
        note = "chosen" if tile == tile_of(num_rows, weights[0].shape[0]) else ""
        found.append((ms, f"{tile} {1e3 * ms:8.1f} us {'' if same else 'other bits '}{note}"))
    library = time_ms(lambda: [torch.nn.functional.linear(x, w) for w in weights], device) / len(weights)
    print(f"{num_rows} rows, weight {tuple(weights[0].shape)}; the library takes {1e3 * library:.1f} us", flush=True)
    for _, line in sorted(found):
        print("  " + line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    device = "cpu" if options.rehearse else "cuda"
    for shape in ((70, 96),) if options.rehearse else WEIGHTS:
        copies = 1 if options.rehearse else -(-MORE_THAN_L2_BYTES // (2 * shape[0] * shape[1]))
        weights = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(copies)]
        for num_rows in ROWS[:2] if options.rehearse else ROWS:
            tune(num_rows, weights, device)


if __name__ == "__main__":
    main()
