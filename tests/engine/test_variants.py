"""Triton compiles all variants while the runner warms up and profiles, and none while it serves steps of any shape. A
separate process has a stand-in for triton's driver that records launches and computes nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from engine.tiny import make_checkpoint

SCRIPT = """
import json, os, sys
import torch
from common.types import BlockRef, SamplingParams, StoppingParams
from engine import start_up
from engine.model_runner import ModelRunner, RunnerSettings
from engine.sampler import SampleRow, prompt_logprobs, sample_rows
from engine.block_table import BlockTable
from engine.sequence import Chunk, Sequence, lay_out
from kernels.cpu import load
from kernels.gpu import attention, copy_blocks, linear, rms_norm, sampling, silu_mul, write_blocks
from kernels.gpu.attention_tiles import Chip
from kernels.gpu.dry import DryDriver

os.environ["TRITON_INTERPRET"] = "1"  # for the runner; the kernels have been imported as they are on a GPU
load("triton")
driver = DryDriver(90)
driver.install()
attention.chip_of = lambda device: Chip(90, 132)
settings = json.loads(sys.argv[2])
runner = ModelRunner(RunnerSettings(sys.argv[1], num_threads=1, attention_backend="triton", **settings))
start_up.profile(runner, 256, 16)
known = {launch.variant for launch in driver.launches}


def serve(*shapes, num_blocks=64):
    "Sequences of (queries, context) in one step over an arena of that many blocks, then draws and a copy."
    runner.bind(torch.zeros(num_blocks, runner.layout.block_bytes, dtype=torch.uint8))
    chunks = []
    for number, (queries, context) in enumerate(shapes):
        table = BlockTable(BlockRef(block % num_blocks, 1) for block in range(-(-context // 16)))
        params = [SamplingParams(temperature=0.0, logprobs=number), SamplingParams(seed=1, top_k=5, top_p=0.5)]
        sequence = Sequence([5] * context, [], params[number % 2], StoppingParams(), table=table)
        sequence.num_computed = context - queries
        chunks.append(Chunk(sequence, queries))
    logits = runner.step(lay_out(chunks, 16).batch)
    sample_rows(logits, [SampleRow.of(chunk.sequence) for chunk in chunks])
    prompt_logprobs(logits, [1] * len(logits), 3)
    runner.copy_blocks([0, 1, 2], [5, 4, 3])


for count in (1, 2, 3, 15, 16):
    for context in (1, 17, 200, 511, 513, 1024, 2047):
        serve(*[(1, context - i % context) for i in range(count)], num_blocks=64 + count)
serve((1, 5), (2, 700), (1, 9))
serve((2, 2))
serve((3, 30), (1, 100), num_blocks=61)
serve((16, 16))
serve((100, 1800), (33, 33), num_blocks=80)
serve((255, 2048))
late = [launch for launch in driver.launches if launch.variant not in known]
json.dump([len(known), sorted({launch.kernel for launch in late})], sys.stdout)
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("deterministic", [False, True])
def test_nothing_is_compiled_while_serving(deterministic: bool, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", head_dim=64, max_position_embeddings=2048, num_hidden_layers=1)
    settings: dict[str, Any] = {"device": "cpu", "deterministic": deterministic, "max_model_len": 2048}
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path, json.dumps(settings)],
        capture_output=True, text=True, cwd=root, timeout=280,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    num_variants, late = json.loads(run.stdout.splitlines()[-1])
    assert not late and num_variants >= 15
