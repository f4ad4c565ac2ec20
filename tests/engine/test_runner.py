"""Runner: arenas it accepts, layouts, profile and warm-up, numerics."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.binding import layer_caches
from engine.runner import ModelRunner, RunnerSettings
from engine.testing import poisoned_arena
from engine.tiny import make_checkpoint


@pytest.fixture
def runner(tmp_path: Path) -> ModelRunner:
    make_checkpoint(tmp_path, "llama")
    return ModelRunner(RunnerSettings(tmp_path, num_threads=1))


def test_arenas_of_another_shape_are_refused(runner: ModelRunner) -> None:
    for wrong in (np.zeros((4, 8), np.uint8), np.zeros((4, runner.layout.block_bytes), np.int8), np.zeros(4, np.uint8)):
        with pytest.raises(ValueError, match="an arena is uint8"):
            runner.bind(wrong)


@pytest.mark.parametrize("order", ["heads_first", "slots_first"])
def test_layer_views_lie_as_the_layout_says(runner: ModelRunner, order: str) -> None:
    layout = replace(runner.layout, order=order)  # type: ignore[arg-type]
    arena = torch.zeros((3, layout.block_bytes), dtype=torch.uint8)
    caches = layer_caches(arena, layout)
    assert caches[1].values.shape == (3, 2, 16, 16)  # [num_blocks, kv_heads, block_size, head_dim]
    caches[1].values[2, 1, 5] = 1.0
    kv = np.flatnonzero(arena.view(torch.int16).numpy()[2])
    inner = (1 * 16 + 5) if order == "heads_first" else (5 * 2 + 1)
    assert kv.tolist() == list(range((1 * 2 + 1) * 512 + inner * 16, (1 * 2 + 1) * 512 + inner * 16 + 16))
    assert not arena[:2].any()


def test_profile_grows_with_the_batch_and_leaves_the_arena_alone(tmp_path: Path) -> None:
    """Against a bound from shapes: logits alone, bf16 and fp32 of every row."""
    make_checkpoint(tmp_path, "llama", vocab_size=32000)
    runner = ModelRunner(RunnerSettings(tmp_path, num_threads=1))
    arena = poisoned_arena(runner, 2)
    runner.bind(arena)
    small, large = runner.profile(64, 8), runner.profile(2048, 8)
    logits_bytes = 2048 * 32000 * (2 + 4)
    assert logits_bytes <= large < 1.5 * logits_bytes
    assert small < large / 4
    assert (arena == 0xFF).all()


def test_numerics_tell_dtype_isa_and_determinism(runner: ModelRunner, tmp_path: Path) -> None:
    fields = dict(part.split("=") for part in runner.numerics.split())
    assert fields["dtype"] == "bfloat16" and fields["isa"] and fields["deterministic"] in ("True", "False")
    other = ModelRunner(RunnerSettings(tmp_path, dtype="float32", num_threads=1))
    assert other.numerics != runner.numerics and other.model_fingerprint != runner.model_fingerprint
