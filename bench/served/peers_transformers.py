"""Runs the served workload in transformers without a server: one request after another, or in static batches of 16.

The harness's environment runs this file as a script; it imports nothing from Looseleaf. Requests come from the harness
(`client.workload`) with a fixed seed. A static batch runs until its longest output is complete, and only requested
tokens count. The last line is JSON.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

BATCH = 16
Request = tuple[str, list[int], int]
"""A request: text, token ids, number of requested tokens."""


def served(scripts: Path, data: Path, count: int) -> list[Request]:
    """Returns the first `count` of the 64 requests of the harness's served workload."""
    sys.path.insert(0, str(scripts))
    client = importlib.import_module("client")
    requests: list[Request] = client.workload(client.Prompts(data, client.SEED), "served", 64)
    return requests[:count]


def generate(model: Any, batch: list[Request]) -> int:
    """Generates the outputs of `batch` in one call. Prompts are padded on the left, and all outputs have the length of
    the longest output. Returns the number of requested tokens.
    """
    torch = importlib.import_module("torch")
    longest = max(len(ids) for _, ids, _ in batch)
    rows = [[0] * (longest - len(ids)) + ids for _, ids, _ in batch]
    mask = [[0] * (longest - len(ids)) + [1] * len(ids) for _, ids, _ in batch]
    wanted = [count for _, _, count in batch]
    with torch.inference_mode():
        out = model.generate(
            input_ids=torch.tensor(rows), attention_mask=torch.tensor(mask), do_sample=False,
            max_new_tokens=max(wanted), min_new_tokens=max(wanted), pad_token_id=0,
        )  # fmt: skip
    assert out.shape[1] == longest + max(wanted), out.shape
    return sum(wanted)


def timed(call: Callable[[], int]) -> tuple[int, float]:
    started = time.perf_counter()
    tokens = call()
    return tokens, time.perf_counter() - started


def load(root: Path, size: str, first: Request) -> tuple[Any, str]:
    """Loads the model in bf16 and in fp32, warms both up, and times a short generation with each. Returns the faster
    model and its dtype.
    """
    found = []
    causal = importlib.import_module("transformers").AutoModelForCausalLM
    probe = [(first[0], first[1][:64], 12)]
    for dtype in ("bfloat16", "float32"):
        model = causal.from_pretrained(root / "models" / f"{size}-{dtype}", dtype=dtype).eval()
        generate(model, [(*probe[0][:2], 2)])
        found.append((timed(partial(generate, model, probe))[1], dtype, model))
    _, dtype, model = min(found, key=lambda item: item[0])
    return model, dtype


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=["alone", "static"])
    parser.add_argument("--harness", type=Path, required=True)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--size", default="M")
    parser.add_argument("--requests", type=int, default=64)
    options = parser.parse_args()
    requests = served(options.harness, options.root / "models", options.requests)
    model, dtype = load(options.root, options.size, requests[0])
    at_once = 1 if options.way == "alone" else BATCH
    batches = [requests[start : start + at_once] for start in range(0, len(requests), at_once)]
    tokens, seconds = timed(lambda: sum(generate(model, batch) for batch in batches))
    print(json.dumps({
        "peer": f"transformers-{options.way}", "model": f"{options.size}-{dtype}", "test": "served",
        "requests": len(requests), "out_tok": tokens, "wall_s": round(seconds, 2),
        "out_tok_s": round(tokens / seconds, 2),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
