"""Measures tokens per second of decode steps (forward pass and sampling) and of a prompt (`python -m bench.engine`).

Uses greedy sampling, and a model with Llama's architecture and 125M random parameters unless a model directory is
given. The sequences of a batch differ. A step's floor is the time to read its weights and KV once at the memory
bandwidth, which the same run measures by reading 256 MB on a CPU or copying 4 GiB on a GPU. Of a mixture's experts,
only those that the step's rows choose are counted. `outside` is the time that a step takes for array layout and
sampling. `python -m bench.decode_worker` measures a worker's whole step. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import numpy as np
import torch

from bench.kernels import memory_limit
from common.types import KvCacheDType
from engine import start_up
from engine.model_runner import ModelRunner, RunnerSettings
from engine.rows import DecodeRows
from engine.sequence import Chunk
from engine.step import StepInput
from engine.step_sampler import Sampler
from kernels.linear import PackedLinear
from testing.engine import Batch

STRIDE = 97
"""The difference between the token ids of consecutive sequences at the same position."""
MODEL = Path(__file__).resolve().parents[1] / "models" / "configs" / "llama-125m"


def bytes_per_s(runner: ModelRunner) -> float:
    """Returns the memory bandwidth of the runner's device in bytes per second. It is the bandwidth of reading on a CPU,
    and of a copy on a GPU, for which bytes read and bytes written count.
    """
    if runner.device.name == "cpu":
        return memory_limit(0.5) * 1e9
    source = torch.randint(255, (4 << 30,), dtype=torch.uint8, device=runner.device.torch_device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        torch.cuda.synchronize()

    return 2 * source.numel() / median_s(copy, 10)


def median_s(call: Callable[[], object], times: int) -> float:
    """Returns the median duration of a call in seconds, after three calls to warm up."""
    seconds = []
    for _ in range(times + 3):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[3:])


def decode_batch(runner: ModelRunner, num_seqs: int, context: int) -> tuple[Batch, DecodeRows]:
    """Returns a batch of `num_seqs` sequences whose next step is a decode step at `context` tokens, and the rows with
    which to lay out its steps. Captures the step's graph on a GPU. KV is zero, because time does not depend on its
    values.
    """
    vocab = runner.config.vocab_size
    prompts = [[(token + STRIDE * number) % vocab for token in range(context)] for number in range(num_seqs)]
    batch = Batch.of(runner, prompts, 1)
    runner.bound_arena.zero_()
    start_up.capture(runner, num_seqs)
    for sequence in batch.sequences:
        sequence.num_computed = context - 1
    return batch, DecodeRows(runner.layout.block_size, len(runner.layout.groups))


def decode(runner: ModelRunner, num_seqs: int, context: int, steps: int, rate: float) -> dict[str, float]:
    """Repeats one decode step of `num_seqs` sequences of `context` tokens each. Returns the results. `rate` is the
    memory bandwidth in bytes per second.
    """
    (batch, rows), sampler = decode_batch(runner, num_seqs, context), Sampler()

    def around() -> None:
        """Does the work of a step except for the forward pass."""
        rows.lay_out(batch.sequences)
        sampler.draw(logits, batch.sequences)

    def step() -> None:
        sampler.draw(runner.step(rows.lay_out(batch.sequences).batch), batch.sequences)

    weight_bytes = bytes_of_weights(runner, rows.lay_out(batch.sequences).batch)
    logits = runner.step(rows.lay_out(batch.sequences).batch)
    outside = median_s(around, 10 * steps)
    median = median_s(step, steps)
    kv_bytes = num_seqs * context * sum(group.bytes_per_token for group in runner.layout.groups)
    floor = (weight_bytes + kv_bytes) / rate
    return {
        "batch": num_seqs, "context": context, "weights_mb": round(weight_bytes / 1e6, 1), "ms": round(median * 1e3, 3),
        "tokens_per_s": round(num_seqs / median, 1), "floor_ms": round(floor * 1e3, 3),
        "of_floor": round(floor / median, 3), "outside_us": round(outside * 1e6, 1),
        "outside_us_per_seq": round(outside / num_seqs * 1e6, 2),
    }  # fmt: skip


def bytes_of_weights(runner: ModelRunner, batch: StepInput) -> int:
    """Returns the size in bytes of the weights of all `PackedLinear` layers that this step calls. Requests the logits
    of one row twice, so that the step is not run as a recorded graph, which would not call `PackedLinear`.
    """
    called: dict[int, PackedLinear] = {}
    multiply = PackedLinear.__call__

    def noted(linear: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        called[id(linear)] = linear
        return multiply(linear, x)

    rows = np.append(batch.logits_rows, batch.logits_rows[:1])
    with patch.object(PackedLinear, "__call__", noted):
        runner.step(replace(batch, logits_rows=rows))
    tensors = [tensor for each in called.values() for tensor in (each.packed, each.weight, each.bias)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def prefill(runner: ModelRunner, num_tokens: int) -> dict[str, float]:
    """Computes a prompt of `num_tokens` tokens in one chunk, three times. Returns the results of the fastest run."""
    vocab, times = runner.config.vocab_size, []
    for _ in range(3):
        batch = Batch.of(runner, [[token % vocab for token in range(num_tokens)]], 1)
        start = time.perf_counter()
        batch.step([Chunk(batch.sequences[0], num_tokens)])
        times.append(time.perf_counter() - start)
    return {"tokens": num_tokens, "ms": round(min(times) * 1e3, 2), "tokens_per_s": round(num_tokens / min(times), 1)}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__)
    parser.add_argument("--model", default=str(MODEL), help="directory with a config.json; its weights are random")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16, 32])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--max-model-len", type=int, help="longest sequence; default: the model's")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--num-threads", type=int, default=0)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--attention-library")
    parser.add_argument("--kv-cache-dtype", choices=get_args(KvCacheDType), default="auto")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--quantization", choices=["int8", "int4"])
    parser.add_argument("--model-impl", choices=["auto", "native", "transformers"], default="auto")
    return parser.parse_args()


def main() -> None:
    args = parse()
    sizes: dict[str, Any] = {name: vars(args).pop(name) for name in ("batches", "context", "steps")}
    start = time.perf_counter()
    runner = ModelRunner(RunnerSettings(load_format="dummy", **vars(args)))
    load_s = round(time.perf_counter() - start, 2)
    print(runner.numerics)
    print(f"weights {runner.weights_bytes / 1e6:.0f} MB loaded in {load_s} s, threads {runner.num_threads}")
    rate = bytes_per_s(runner)
    print(f"memory {rate / 1e9:.1f} GB/s")
    runs = []
    for size in sizes["batches"]:
        run = decode(runner, size, sizes["context"], sizes["steps"], rate)
        runs.append(run)
        line = f"decode batch {size:3}: {run['ms']:8.2f} ms  {run['tokens_per_s']:8.1f} tok/s"
        print(f"{line}  {run['of_floor']:.0%} of floor, {run['outside_us']:.0f} us outside the pass")
    prompt = prefill(runner, sizes["context"])
    print(f"prefill {prompt['tokens']} tokens: {prompt['ms']:.1f} ms  {prompt['tokens_per_s']:.0f} tok/s")
    print(json.dumps({
        "bench": "engine", "model": args.model, "numerics": runner.numerics, "threads": runner.num_threads,
        "torch": torch.__version__, "load_s": load_s, "gb_per_s": round(rate / 1e9, 1), "decode": runs,
        "prefill": prompt,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
