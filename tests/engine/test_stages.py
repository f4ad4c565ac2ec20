"""A model has the same bits in one process and in stages, which compute parts of a step at the same time."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import Family
from engine.errors import ModelError
from engine.model_runner import ModelRunner, RunnerSettings
from engine.ranks.micro_batches import how_many, split
from engine.sequence import Chunk, lay_out
from engine.start_up import scratch_batch
from engine.tiny import make_checkpoint
from testing.engine import Batch
from testing.quantized import FORMATS, make_quantized
from testing.ranks import PROMPTS, ThreadRanks, logits_of


def settings_of(path: Path, **more: Any) -> RunnerSettings:
    return RunnerSettings(path, **({"num_threads": 1} | more))


@pytest.mark.parametrize("count", [2, 5, 40])
def test_a_step_in_parts_has_the_bits_of_a_whole_one(count: int, tmp_path: Path) -> None:
    """With windows, and requested rows in any order. Some parts begin and end inside a prompt, or request no row."""
    make_checkpoint(tmp_path, "gemma2", std=0.1)
    runner = ModelRunner(settings_of(tmp_path))
    batch = Batch.of(runner, PROMPTS, 2)
    step = lay_out([Chunk(each, each.num_tokens) for each in batch.sequences], 16).batch
    step = replace(step, logits_rows=np.array([158, 3, 40, 0, 157, 41, 42, 7], np.int64))
    expected = runner.step(step).clone()
    runner.bind(runner.new_arena(len(runner.bound_arena), fill=0xFF))
    found = torch.full_like(expected, torch.nan)
    parts = split(step, count)
    for part in parts:
        found[part.places] = runner.step(part.step)
    assert torch.equal(found, expected)
    assert sum(len(part.step.token_ids) for part in parts) == 159


def test_large_steps_are_divided_and_small_ones_are_not() -> None:
    assert [how_many(512, 1), how_many(1, 8), how_many(16, 2)] == [1, 1, 1]
    assert [how_many(64, 2), how_many(512, 2), how_many(512, 4)] == [3, 7, 12]


@pytest.mark.parametrize("kind", ["mixtral", "tied", "int4", "gptq-4"])
def test_models_that_ranks_cannot_divide_run_in_stages(kind: str, tmp_path: Path) -> None:
    """A stage loads its own layers, and all stages together no more than one process."""
    more: dict[str, Any] = {"quantization": "int4"} if kind == "int4" else {}
    if kind in FORMATS:
        make_quantized(tmp_path / "model", tmp_path / "twin", FORMATS["gptq-4"])
    else:
        family: Family = "mixtral" if kind == "mixtral" else "llama"
        make_checkpoint(tmp_path / "model", family, std=0.1, tie_word_embeddings=kind == "tied")
    settings = settings_of(tmp_path / "model", **more)
    alone = ModelRunner(settings)
    expected = logits_of(alone, None, 300)
    with ThreadRanks(settings, 1, stages=2) as ranks:
        for one, other in zip(expected, logits_of(ranks.runner, ranks, 300), strict=True):
            assert torch.equal(one, other)
        sizes = [runner.weights_bytes for runner in ranks.runners]
    assert sum(sizes) == alone.weights_bytes and max(sizes) < 0.8 * alone.weights_bytes


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("opt", {}, "pipeline_parallel_size 2 does not support OPT"),
        ("llama", {"enable_lora": True}, "pipeline_parallel_size 2 does not support enable_lora"),
        ("llama", {"pipeline_parallel_size": 4}, "pipeline_parallel_size 4 is more than the model's 3 layers"),
        ("llama", {"pipeline_parallel_size": 9}, "pipeline_parallel_size 9 is not 1 to 8"),
        ("mixtral", {"tensor_parallel_size": 2}, "mixtures of experts"),
    ],
)
def test_what_has_no_stages_is_refused(family: Family, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family)
    with pytest.raises(ModelError, match=message):
        ModelRunner(settings_of(tmp_path, **({"pipeline_parallel_size": 2} | settings)))


def test_a_damaged_layer_is_found_by_the_stage_that_has_it(tmp_path: Path) -> None:
    """The first stage ignores the tensors of other stages. The last one reports an unknown one."""
    make_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"model.layers.2.surprise": torch.zeros(1)}, file)
    with pytest.raises(ModelError, match=r"unexpected tensor model.layers.2.surprise"):
        ThreadRanks(settings_of(tmp_path), 1, stages=2)


def test_a_stage_does_not_wait_for_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second stage begins only when the first one has computed all parts of a step, whose hidden states are larger
    than the buffer of a socket.
    """
    make_checkpoint(tmp_path)
    with ThreadRanks(settings_of(tmp_path), 1, stages=2) as ranks:
        first, second = ranks.runners
        ranks.bind(first.new_arena(1))
        step = scratch_batch(first, 500, 8, 500)
        num_left, is_ahead = how_many(4000, 2), threading.Event()
        compute_first, compute_second = first._logits, second._logits

        def leading(*args: Any) -> torch.Tensor:
            nonlocal num_left
            num_left -= 1
            states = compute_first(*args)
            if not num_left:
                is_ahead.set()
            return states

        def following(*args: Any) -> torch.Tensor:
            assert is_ahead.wait(60.0)
            return compute_second(*args)

        monkeypatch.setattr(first, "_logits", leading)
        monkeypatch.setattr(second, "_logits", following)
        assert first.step(step).shape == (4000, first.config.vocab_size)
        assert is_ahead.is_set()
