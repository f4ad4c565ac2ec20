"""Measures the effect of a JSON schema on a decode step and on the time to first token (`python -m bench.structured`).

The first part measures steps of a model with random weights, with `--batch` sequences at position `--context`. The
variants alternate, one step at a time, so that other load on the machine affects all of them: free text, text with a
JSON schema for one sequence or for all, and text with a schema whose strings are bounded. A step consists of the
forward pass, the masks, the draw and the tokens' bookkeeping. Tokens are drawn at random, and a new sequence replaces
one that ends. The tokenizer is a byte-level BPE that is trained on this repository's files. It has as many tokens as
these files yield, but at most the model's vocabulary size.

The second part serves the built-in model. It sends requests in `--batch` streams, alternately with and without the
schema. The first round's time includes the compilation of the schema.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from common.types import SamplingParams, StoppingParams, StructuredOutput
from engine.model_runner import ModelRunner, RunnerSettings
from engine.rows import DecodeRows
from engine.sequence import Sequence
from engine.step_sampler import Sampler
from looseleaf import LLM, AsyncClient
from testing.engine import Batch
from worker.grammars import Grammars

ROOT = Path(__file__).resolve().parents[1]
HERO: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "home": {"anyOf": [{"type": "null"}, {"type": "string"}]},
        "tags": {"type": "array", "items": {"enum": ["brave", "old", "small", "kind"]}, "maxItems": 5},
    },
    "required": ["name", "age", "home", "tags"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": HERO, "minItems": 60, "maxItems": 80}
BOUNDED = json.loads(json.dumps(SCHEMA).replace('"type": "string"', '"type": "string", "maxLength": 40'))
"""The same schema with bounded strings, whose masks take longer to compute."""
EOS = 2


def write_tokenizer(directory: Path, vocab_size: int) -> int:
    """Trains a tokenizer on the repository's files. Returns the number of its tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    files = [*ROOT.glob("*/**/*.py"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("loadtest/**/*.csv")]
    tokenizer.train([str(file) for file in files if ".venv" not in file.parts], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return tokenizer.get_vocab_size()


def _grammar(schema: dict[str, Any]) -> StructuredOutput:
    return StructuredOutput("json_schema", json.dumps(schema))


class Arm:
    """A variant, whose `step` repeats the same forward pass, and draws the next token of each sequence."""

    def __init__(
        self, runner: ModelRunner, grammars: Grammars, args: argparse.Namespace, schemas: list[dict[str, Any] | None]
    ) -> None:
        self._runner, self._grammars = runner, grammars
        tokens = [5 + token % 1000 for token in range(args.context)]
        self._laid_out = Batch.of(runner, [tokens] * args.batch, 1).sequences
        runner.bound_arena.zero_()  # KV is zero, because time does not depend on its values
        for sequence in self._laid_out:
            sequence.num_computed = args.context - 1
        self._arena = runner.bound_arena
        self._rows, self._sampler = DecodeRows(runner.layout.block_size), Sampler()
        self._stopping = StoppingParams(max_tokens=512, stop_token_ids=(EOS,))
        self._sampling = [
            SamplingParams(temperature=1.0, seed=i, structured=None if schema is None else _grammar(schema))
            for i, schema in enumerate(schemas)
        ]
        self._drawing = [self._begin(i) for i in range(args.batch)]
        self.seconds = list[float]()

    def _begin(self, index: int) -> Sequence:
        sequence = Sequence([5], [], self._sampling[index], self._stopping)
        self._grammars.attach([sequence])
        return sequence

    def step(self) -> None:
        self._runner.bind(self._arena)
        start = time.perf_counter()
        logits = self._runner.step(self._rows.lay_out(self._laid_out).batch)
        for sequence in self._drawing:
            if sequence.grammar is not None:
                sequence.grammar.mask(sequence.output_ids)
        ended = []
        for index, sampled in enumerate(self._sampler.draw(logits, self._drawing)):
            self._drawing[index].output_ids.append(sampled.token_id)
            if self._drawing[index].finish_reason(1 << 20) is not None:
                ended.append(index)
        self.seconds.append(time.perf_counter() - start)
        for index in ended:
            self._drawing[index] = self._begin(index)


def measure_steps(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        runner = ModelRunner(RunnerSettings(args.model, load_format="dummy", device="cpu"))
        vocab_size = runner.config.vocab_size
        num_tokens = write_tokenizer(Path(name), vocab_size)
        grammars = Grammars(name, vocab_size)
        arms = {
            "free": Arm(runner, grammars, args, [None] * args.batch),
            "one": Arm(runner, grammars, args, [SCHEMA] + [None] * (args.batch - 1)),
            "all": Arm(runner, grammars, args, [SCHEMA] * args.batch),
            "all, bounded strings": Arm(runner, grammars, args, [BOUNDED] * args.batch),
        }
        for _ in range(args.steps + 5):
            for arm in arms.values():
                arm.step()
    ms = {name: statistics.median(arm.seconds[5:]) * 1e3 for name, arm in arms.items()}
    extra = {
        name: statistics.median(a - b for a, b in zip(arms[name].seconds[5:], arms["free"].seconds[5:], strict=True))
        for name in arms
    }
    return {
        "vocab_size": vocab_size, "tokenizer": num_tokens, "ms": {name: round(value, 3) for name, value in ms.items()},
        "extra_percent": {name: round(value * 1e5 / ms["free"], 1) for name, value in extra.items()},
    }  # fmt: skip


async def one(client: AsyncClient, number: int, options: dict[str, Any]) -> tuple[float, float]:
    """Runs one stream. Returns (time to first token, mean time between tokens) in milliseconds."""
    began, first, count, last = time.perf_counter(), 0.0, 0, 0.0
    async for delta in client.stream(f"Hero number {number}:", temperature=1.0, seed=number, max_tokens=120, **options):
        last = time.perf_counter()
        first = first or last
        count += len(delta.token_ids)
    return (first - began) * 1e3, (last - first) * 1e3 / max(1, count - 1)


async def measure_served(llm: LLM, args: argparse.Namespace) -> dict[str, Any]:
    arms: dict[str, dict[str, Any]] = {"free": {"ignore_eos": True}, "schema": {"structured_output": _grammar(SCHEMA)}}
    ttft: dict[str, list[float]] = {name: [] for name in arms}
    between: dict[str, list[float]] = {name: [] for name in arms}
    first_round = {}
    async with AsyncClient(llm.addresses.grpc) as client:
        await one(client, 0, arms["free"])
        for number in range(args.rounds + 1):
            for name, options in arms.items():
                found = await asyncio.gather(
                    *(one(client, args.batch * number + i, options) for i in range(args.batch))
                )
                if not number:
                    first_round[name] = round(statistics.median(value for value, _ in found), 2)
                    continue
                ttft[name] += [value for value, _ in found]
                between[name] += [value for _, value in found]
    return {
        "ttft_ms": {name: round(statistics.median(values), 2) for name, values in ttft.items()},
        "first_round_ttft_ms": first_round,
        "between_tokens_ms": {name: round(statistics.median(values), 3) for name, values in between.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.structured", description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "configs" / "llama-125m")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=10, help="rounds of served requests")
    args = parser.parse_args()
    found = {"step": measure_steps(args)}
    print("step", found["step"], flush=True)
    with LLM(num_blocks=4096) as llm:
        found["served"] = asyncio.run(measure_served(llm, args))
    print("served", found["served"], flush=True)
    print(json.dumps({"bench": "structured", "batch": args.batch, "context": args.context, **found}))


if __name__ == "__main__":
    main()
