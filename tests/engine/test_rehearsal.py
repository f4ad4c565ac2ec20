"""The GPU path without a GPU: tiny models run with the Triton kernels in triton's interpreter, and are compared with
the CPU's kernels. They run in a separate process, because the interpreter must be selected before triton is first
imported. Run as a script, this file is that process. It prints one JSON object with the results of each case.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.types import SamplingParams, StoppingParams
from engine import start_up
from engine.model_runner import ModelRunner, RunnerSettings
from engine.sampler import SampleRow, prompt_logprobs, sample_rows
from engine.sequence import Chunk, lay_out
from engine.tiny import make_checkpoint
from kernels import cpu
from testing.engine import Batch
from testing.gpu_kernels import keep_rows

PROMPTS = [list(range(5, 23)), [30, 31, 32]]
SEEDED = SamplingParams(
    temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, seed=7, repetition_penalty=1.2, frequency_penalty=0.1,
    logit_bias=((9, 1.5),), logprobs=3,
)  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("qwen3", {"dtype": "float32"}),
    "deterministic": ("opt", {"dtype": "float32", "deterministic": True}),
    "deterministic-bf16": ("llama", {"dtype": "bfloat16", "deterministic": True}),
    "fp8": ("llama", {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"}),
}
"""Each case's family, which is also the name of its checkpoint's directory, and the runner's settings."""


def run(directory: Path, **settings: Any) -> dict[str, Any]:
    """Returns greedy tokens of a batch in chunks of 8 (in deterministic mode, also in one chunk and padded to a bucket
    of 4), a token sampled with every filter and penalty, log-probabilities, and the result of a copy.
    """
    runner = ModelRunner(RunnerSettings(directory, num_threads=1, max_model_len=32, **settings))
    batch = Batch.of(runner, PROMPTS, 4, budget=8)
    outputs = batch.run()
    row = SampleRow(SEEDED, StoppingParams(min_tokens=9, stop_token_ids=(4,)), PROMPTS[0], outputs[0], 1, 2)
    logits = torch.stack([batch.logits[0][0], batch.logits[0][1]])
    drawn, greedy = sample_rows(logits, [row, SampleRow.of(batch.sequences[0])])
    arena = runner.bound_arena.tolist()
    runner.copy_blocks([0], [1])
    assert drawn.logprob is not None
    return {
        "numerics": runner.numerics,
        "block_bytes": runner.layout.block_bytes,
        "arena": arena,
        "tokens": outputs,
        "drawn": [drawn.token_id, greedy.token_id, [token for token, _ in drawn.logprob.top]],
        "logprobs": [entry.logprob for entry in prompt_logprobs(logits, [7, 9], 2)],
        "logits": [[row.tolist() for row in rows] for rows in batch.logits],
        "copied": torch.equal(runner.bound_arena[0], runner.bound_arena[1]),
        "same_bits": _padded(runner, batch) if settings.get("deterministic") else None,
    }


def _padded(runner: ModelRunner, batch: Batch) -> bool:
    """Returns whether another batch, prefilled in one chunk and decoded in a bucket of 4, has the same bits."""
    again = Batch.of(runner, PROMPTS, 3, budget=64)
    graphs = start_up.new_graphs(runner, 4)
    with torch.inference_mode():
        assert start_up.capture_bucket(runner, graphs, 4, runner.binding.caches)
    runner.binding.graphs = graphs
    again.run()
    pairs = zip(batch.logits, again.logits, strict=True)
    return all(torch.equal(torch.stack(a[:3]), torch.stack(b)) for a, b in pairs)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for family in ("qwen3", "opt", "llama"):
        make_checkpoint(path / family, family, seed=4, std=0.2, num_hidden_layers=2)  # type: ignore[arg-type]
    return path


@pytest.fixture(scope="module")
def rehearsed(directory: Path) -> dict[str, Any]:
    """The results of every case with the Triton kernels, computed in a separate process."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    done = subprocess.run(
        [sys.executable, __file__, str(directory)],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    answers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


def on_cpu(directory: Path, case: str) -> dict[str, Any]:
    family, settings = CASES[case]
    return run(directory / family, **{name: settings[name] for name in ("dtype", "deterministic") if name in settings})


@pytest.mark.parametrize("case", ["plain", "deterministic"])
def test_tokens_are_those_of_the_cpu(case: str, directory: Path, rehearsed: dict[str, Any]) -> None:
    expected, got = on_cpu(directory, case), rehearsed[case]
    assert got["tokens"] == expected["tokens"] and got["drawn"] == expected["drawn"]
    assert torch.allclose(torch.tensor(got["logits"]), torch.tensor(expected["logits"]), atol=2e-4)
    assert torch.allclose(torch.tensor(got["logprobs"]), torch.tensor(expected["logprobs"]), atol=2e-4)
    assert got["copied"] and "attention=triton/" in got["numerics"] and "isa=triton" in got["numerics"]
    assert f"deterministic={case == 'deterministic'}" in got["numerics"]


@pytest.mark.parametrize("case", ["deterministic", "deterministic-bf16"])
def test_deterministic_mode_gives_the_same_bits_in_every_company(
    case: str, directory: Path, rehearsed: dict[str, Any]
) -> None:
    """Compares chunks of 8 with one chunk, and eager decode with a padded bucket. Only a GPU can show what tensor cores
    do."""
    expected, got = on_cpu(directory, case), rehearsed[case]
    assert got["same_bits"] and expected["same_bits"]
    assert difference(got, expected) < 0.05


def test_an_fp8_cache_takes_half_the_bytes_and_is_read_as_what_it_holds(
    directory: Path, rehearsed: dict[str, Any]
) -> None:
    """Repeats the last step on the CPU, with the same blocks converted to bf16. The written values are not compared,
    because the interpreter rounds to fp8 in a different way. Even the two bf16 computations differ by 0.04 with this
    model.
    """
    got = rehearsed["fp8"]
    runner = ModelRunner(RunnerSettings(directory / "llama", num_threads=1, max_model_len=32))
    assert got["block_bytes"] * 2 == runner.layout.block_bytes and "kv=float8_e4m3fn" in got["numerics"]
    runner.layout = replace(runner.layout, order="heads_first")  # as on a GPU
    batch = Batch.of(runner, PROMPTS, 4)  # the same tables
    cells = torch.tensor(got["arena"], dtype=torch.uint8).view(torch.float8_e4m3fn)
    runner.bound_arena.copy_(cells.to(torch.bfloat16).view(torch.uint8))
    for sequence, tokens in zip(batch.sequences, got["tokens"], strict=True):
        sequence.output_ids, sequence.num_computed = tokens[:-1], sequence.num_tokens + len(tokens) - 2
    step = lay_out([Chunk(sequence, 1) for sequence in batch.sequences], 16).batch
    step.slot_mappings = (np.full(2, -1, np.int64),)  # the K and V of the last token are already stored, rounded
    again = runner.step(step)
    last = torch.tensor([rows[-1] for rows in got["logits"]])
    assert float((again - last).square().mean().sqrt() / last.std()) < 0.06


def difference(got: dict[str, Any], expected: dict[str, Any]) -> float:
    """Returns the root mean square of the difference in the first output token's logits, relative to their standard
    deviation.
    """
    ours, theirs = (torch.tensor([rows[0] for rows in answer["logits"]]) for answer in (got, expected))
    return float((ours - theirs).square().mean().sqrt() / theirs.std())


if __name__ == "__main__":
    keep_rows()
    cpu.load("triton")
    root = Path(sys.argv[1])
    print(json.dumps({
        name: run(root / family, attention_backend="triton", **settings) for name, (family, settings) in CASES.items()
    }))  # fmt: skip
