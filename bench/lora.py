"""Measures the cost of LoRA adapters in a decode step on this CPU (`python -m bench.lora`).

Times batches of a model with Llama's architecture and 125M random parameters. The variant `off` runs without
--enable-lora. In the other variants, no sequence has an adapter, all sequences have the same adapter, or the sequences
have up to eight different adapters. The variants alternate, one step at a time, so that other load on the machine
affects all of them. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from pathlib import Path

import torch

from bench.quantization import MODELS, Decoding
from bench.rounds import turned
from engine.lora import LoraAdapter
from engine.model_runner import ModelRunner, RunnerSettings
from kernels.lora import LoraPart, LoraWeights

RANK = 16


def random_adapter(runner: ModelRunner, seed: int) -> LoraAdapter:
    """Returns a random adapter of rank `RANK` for every linear layer of the decoder's layers."""
    generator, products = torch.Generator().manual_seed(seed), []
    for site in runner.model.sites:
        at, parts = 0, list[LoraPart]()
        for matrix in site.parts:
            a, b = (torch.randn(RANK, n, generator=generator).bfloat16() / 100 for n in (matrix.n_in, matrix.n_out))
            parts.append(LoraPart(a, b, at, 1.0))
            at += matrix.n_out
        products.append(parts)
    return LoraAdapter(f"{seed:064x}", LoraWeights(products))


def decode_ms(
    runners: dict[str, ModelRunner], adapters: list[LoraAdapter], num_seqs: int, context: int, steps: int
) -> dict[str, float]:
    """Returns the median duration of a step in milliseconds for each variant."""
    counts = {"off": 0, "0 adapters": 0, "1 adapter": 1, f"{len(adapters)} adapters": len(adapters)}
    arms = {name: Decoding(runners["off" if name == "off" else "on"], num_seqs, context) for name in counts}
    for name, count in counts.items():
        for index, sequence in enumerate(arms[name].sequences if count else ()):
            sequence.adapter = adapters[index % count]
    for turn in range(steps + 3):
        for arm in turned(list(arms.values()), turn):
            arm.step()
    return {name: statistics.median(arm.seconds[3:]) * 1e3 for name, arm in arms.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.lora", description=__doc__)
    parser.add_argument(
        "--model", type=Path, default=MODELS / "configs" / "llama-125m", help="a config.json's directory"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    settings = RunnerSettings(args.model, load_format="dummy", device="cpu", max_lora_rank=RANK)
    runners = {"off": ModelRunner(settings)}
    with_adapters = RunnerSettings(args.model, load_format="dummy", device="cpu", enable_lora=True, max_lora_rank=RANK)
    runners["on"] = ModelRunner(with_adapters, runners["off"].model)
    adapters = [random_adapter(runners["on"], seed) for seed in range(args.adapters)]
    print(f"an adapter of rank {RANK} has {adapters[0].weights.num_bytes / 1e6:.1f} MB, the model "
          f"{runners['off'].weights_bytes / 1e6:.0f} MB")  # fmt: skip
    found = {size: decode_ms(runners, adapters, size, args.context, args.steps) for size in args.batches}
    for size, by_variant in found.items():
        cells = (f"{name} {ms:.2f} ms ({ms / by_variant['off']:.3f}x)" for name, ms in by_variant.items())
        print(f"batch {size:3}: " + ", ".join(cells))
    about = {"bench": "lora", "model": str(args.model), "numerics": runners["off"].numerics}
    print(json.dumps({**about, "cpu": platform.processor(), "rank": RANK, "decode_ms": found}))


if __name__ == "__main__":
    main()
