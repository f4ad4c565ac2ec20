"""Compares our speed with that of transformers for a model with recurrent states (`python -m bench.states`).

The model has the architecture of Mamba-2 130M and random weights, and runs on this CPU. Our engine and transformers are
measured in turn, with a prompt and with decode steps of several batch sizes and context lengths (with states, the time
of a step does not depend on the length). In transformers, the model runs in float32 and uses the cache of transformers.
In our engine, it runs in bf16. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from engine.model_runner import ModelRunner, RunnerSettings
from engine.rows import DecodeRows
from engine.sequence import Chunk
from testing.against_transformers import cache_name
from testing.engine import Batch

MODEL = Path(__file__).resolve().parents[1] / "models" / "configs" / "mamba2-130m"


class Ours:
    """A model in our engine."""

    def __init__(self, model: Path) -> None:
        self._runner = ModelRunner(RunnerSettings(model, load_format="dummy", device="cpu"))
        layout = self._runner.layout
        self._rows = DecodeRows(layout.block_size, len(layout.groups))

    def prefill(self, tokens: list[int]) -> None:
        batch = Batch.of(self._runner, [tokens], 1)
        batch.step([Chunk(batch.sequences[0], len(tokens))])

    def decoder(self, num_seqs: int, context: int) -> Callable[[], object]:
        """Returns a function that computes the position after `context - 1` tokens of each sequence."""
        batch = Batch.of(self._runner, [[1] * context] * num_seqs, 1)
        self._runner.bound_arena.zero_()
        for sequence in batch.sequences:
            sequence.num_computed = context - 1
        return lambda: self._runner.step(self._rows.lay_out(batch.sequences).batch)


class Theirs:
    """A model in transformers."""

    def __init__(self, model: Path) -> None:
        config = transformers.AutoConfig.from_pretrained(model)
        built = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
        self._model: Any = built.eval()

    @torch.inference_mode()
    def prefill(self, tokens: list[int]) -> Any:
        return self._model(torch.tensor([tokens]), use_cache=True, logits_to_keep=1)

    @torch.inference_mode()
    def decoder(self, num_seqs: int, context: int) -> Callable[[], object]:
        """Returns a function that computes one more position of each sequence. The cache has only 16 tokens at the
        start, because the time of a step does not depend on the context.
        """
        tokens = torch.ones((num_seqs, 16), dtype=torch.int64)
        name = cache_name(self._model)
        cache = getattr(self._model(tokens, use_cache=True, logits_to_keep=1), name)

        @torch.inference_mode()
        def step() -> object:
            return self._model(tokens[:, :1], use_cache=True, **{name: cache}).logits

        return step


def median_ms(call: Callable[[], object], times: int) -> float:
    """Returns the median duration of a call in milliseconds, after one warm-up call."""
    call()
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        taken.append((time.perf_counter() - start) * 1e3)
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.states", description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    sides: dict[str, Ours | Theirs] = {"ours": Ours(args.model), "transformers": Theirs(args.model)}
    parts: dict[str, Callable[[Ours | Theirs], float]] = {
        "prefill 512": lambda side: median_ms(lambda: side.prefill([7] * 512), 1),
        "decode 1 at 512": lambda side: median_ms(side.decoder(1, 512), args.steps),
        "decode 1 at 8192": lambda side: median_ms(side.decoder(1, 8192), args.steps),
        "decode 8 at 512": lambda side: median_ms(side.decoder(8, 512), args.steps),
        "decode 32 at 512": lambda side: median_ms(side.decoder(32, 512), args.steps),
    }
    found: dict[str, dict[str, list[float]]] = {part: {side: [] for side in sides} for part in parts}
    for _ in range(args.rounds):
        for part, measure in parts.items():
            for name, side in sides.items():
                found[part][name].append(measure(side))
    medians = {part: {side: statistics.median(ms) for side, ms in each.items()} for part, each in found.items()}
    for part, each in medians.items():
        ratio = each["transformers"] / each["ours"]
        print(f"{part:18} ours {each['ours']:9.1f} ms, transformers {each['transformers']:9.1f} ms: {ratio:.2f}x")
    result = {"bench": "states", "model": args.model.name, "threads": torch.get_num_threads(), "ms": medians}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
