"""Compares keys and values of 16 and 8 bits on this CPU (`python -m bench.kv_cache`).

The first part measures the speed of decode steps of a model with Llama's architecture and 125M random parameters, at
several context lengths and batch sizes. The variants alternate, one step at a time, so that other load on the machine
affects all of them. The second part measures the quality of the built-in model on stories that were not in its training
data, in fp32 except for keys and values. The measures are perplexity, the distance of the logits from those with
unrounded keys and values, and the share of positions at which both have the same most likely token. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.quantization import MODELS, decode_ms, report, stories
from common.types import KvCacheDType
from engine.model_runner import ModelRunner, RunnerSettings
from testing.oracle import Oracle

ARMS: dict[str, KvCacheDType] = {"bfloat16": "auto", "int8": "int8", "fp8": "fp8"}
EXACT = "float32"


def runners_of(model: Path, max_len: int, directory: Path) -> dict[str, ModelRunner]:
    """Returns a runner for each variant, all with the same random weights, for sequences of up to `max_len` tokens."""
    shape = json.loads((model / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**shape, "max_position_embeddings": max_len}))
    settings = RunnerSettings(directory, load_format="dummy", device="cpu")
    first = ModelRunner(settings)
    others = {name: replace(settings, kv_cache_dtype=chosen) for name, chosen in ARMS.items()}
    return {name: ModelRunner(each, first.model) for name, each in others.items()}


def quality(num_stories: int) -> tuple[dict[str, dict[str, float]], int]:
    """Returns the measures of quality for keys and values of 8 bits and of 32 bits, and the number of tokens."""
    chosen: dict[str, KvCacheDType] = {EXACT: "auto", "int8": "int8", "fp8": "fp8"}
    settings = RunnerSettings(MODELS / "storyteller", dtype="float32", device="cpu")
    runners = {name: ModelRunner(replace(settings, kv_cache_dtype=kind)) for name, kind in chosen.items()}
    sums = {name: torch.zeros(3, dtype=torch.float64) for name in runners}  # -log-probability, distance, agreement
    max_len, count = runners[EXACT].max_model_len, 0
    for ids in stories(max_len, num_stories):
        logits = {name: Oracle(runner).logits(ids)[:-1] for name, runner in runners.items()}
        exact, targets = logits[EXACT], torch.tensor(ids[1:])[:, None]
        for name, found in logits.items():
            chosen_logprobs = found.double().log_softmax(-1).gather(1, targets)
            distances = (found - exact).std(-1) / exact.std(-1)
            agree = found.argmax(-1) == exact.argmax(-1)
            sums[name] += torch.stack((-chosen_logprobs.sum(), distances.double().sum(), agree.double().sum()))
        count += len(ids) - 1
    names = ("perplexity", "logit distance", "same token")
    means = {name: dict(zip(names, (each / count).tolist(), strict=True)) for name, each in sums.items()}
    return {name: {**each, "perplexity": math.exp(each["perplexity"])} for name, each in means.items()}, count


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.kv_cache", description=__doc__)
    parser.add_argument("--model", type=Path, default=MODELS / "configs" / "llama-125m", help="with a config.json")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 4096, 16384])
    parser.add_argument("--most-tokens", type=int, default=1 << 17, help="skip a larger batch x context")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--stories", type=int, default=60)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        runners = runners_of(args.model, max(args.contexts) + 1, Path(directory))
    found: dict[str, Any] = {
        name: {"bytes a token": runner.layout.groups[0].bytes_per_token} for name, runner in runners.items()
    }
    for context in args.contexts:
        for size in args.batches:
            if size * context > args.most_tokens:
                continue
            times = {name: median for name, (median, _) in decode_ms(runners, size, context, args.steps).items()}
            print(
                f"{size} x {context:,}: " + ", ".join(f"{name} {ms:.1f} ms" for name, ms in times.items()), flush=True
            )
            for name, ms in times.items():
                found[name][f"{size} x {context:,} ms"] = ms
    report(found)
    scores, num_tokens = quality(args.stories)
    for name, score in scores.items():
        print(f"{name:>9} KV: " + ", ".join(f"{figure} {value:.4f}" for figure, value in score.items()))
    print(f"over {num_tokens:,} tokens")
    about = {"bench": "kv_cache", "model": str(args.model), "numerics": runners["int8"].numerics}
    print(json.dumps({**about, "cpu": platform.processor(), "tokens": num_tokens, "arms": found, "quality": scores}))


if __name__ == "__main__":
    main()
