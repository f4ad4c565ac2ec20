"""`ModelRunner`: rejected settings, accepted arenas, layouts, sharing, profiling and warm-up, numerics."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.settings import WorkerSettings
from engine import start_up
from engine.binding import layer_caches
from engine.errors import ModelError
from engine.model_runner import ModelRunner, RunnerSettings
from engine.tiny import make_checkpoint
from testing.engine import Batch, poisoned_arena


@pytest.fixture
def runner(tmp_path: Path) -> ModelRunner:
    make_checkpoint(tmp_path, "llama")
    return ModelRunner(RunnerSettings(tmp_path, num_threads=1, device="cpu"))


def test_arenas_of_another_shape_are_refused(runner: ModelRunner) -> None:
    for wrong in (np.zeros((4, 8), np.uint8), np.zeros((4, runner.layout.block_bytes), np.int8), np.zeros(4, np.uint8)):
        with pytest.raises(ValueError, match="an arena is uint8"):
            runner.bind(wrong)


def test_a_gpu_arena_cannot_be_bound_on_a_cpu(runner: ModelRunner) -> None:
    class OnAGpu:
        __cuda_array_interface__ = {"shape": (4, runner.layout.block_bytes), "typestr": "|u1", "data": (64, False)}  # noqa: RUF012

    with pytest.raises(ValueError, match="an arena in a GPU's memory cannot be bound to a runner on cpu"):
        runner.bind(OnAGpu())


def test_numpy_arrays_and_tensors_are_bound_without_a_copy(runner: ModelRunner) -> None:
    array = np.zeros((2, runner.layout.block_bytes), np.uint8)
    for arena in (array, torch.from_numpy(array)):
        runner.bind(arena)
        assert runner.bound_arena.data_ptr() == array.ctypes.data


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"dtype": "float16", "device": "cpu"}, "dtype float16 needs a GPU; on a CPU use bfloat16 or float32"),
        (
            {"dtype": "float32", "kv_cache_dtype": "bfloat16", "device": "cpu"},
            "attention provider cpu has no bfloat16 cache for queries in float32",
        ),
        ({"attention_backend": "fa3", "device": "cpu"}, "attention provider fa3 needs a GPU of compute capability 9.0"),
        ({"attention_backend": "triton", "device": "cpu"}, "provider triton runs on a CPU only as a rehearsal"),
    ],
)  # fmt: skip
def test_what_this_machine_cannot_do_is_refused_in_one_sentence(
    settings: dict[str, Any], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    make_checkpoint(tmp_path, "llama")
    with pytest.raises(ModelError, match=sentence):
        ModelRunner(RunnerSettings(tmp_path, **settings))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    with pytest.raises(ModelError, match="device cuda was requested, but torch finds no GPU"):
        ModelRunner(RunnerSettings(tmp_path, device="cuda"))


def test_a_workers_flags_reach_the_runner() -> None:
    flags: dict[str, Any] = {
        "model": "m", "dtype": "float16", "block_size": 32, "seed": 3, "device": "cuda", "enforce_eager": True,
        "attention_backend": "fa3", "attention_library": "x.so", "deterministic": True, "kv_cache_dtype": "fp8_e4m3",
    }  # fmt: skip
    settings = RunnerSettings.of(WorkerSettings(**flags))
    assert {name: getattr(settings, name) for name in flags} == flags


def test_two_runners_share_weights_and_nothing_else(runner: ModelRunner, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "engine")
    expected = Batch.of(runner, [[5, 6, 7], [8] * 20], 6).run()
    other = ModelRunner.sharing(runner)
    assert other.weights_bytes == 0 < runner.weights_bytes and "loading" not in caplog.text
    assert other.numerics == runner.numerics and other.model_fingerprint == runner.model_fingerprint
    ours, theirs = Batch.of(runner, [[5, 6, 7], [8] * 20], 6), Batch.of(other, [[5, 6, 7], [8] * 20], 6, budget=9)
    assert other.attention is not runner.attention and other.bound_arena is not runner.bound_arena
    assert theirs.run() == expected  # in its own arena, in which the first batch has computed nothing
    assert bool((runner.bound_arena == 0xFF).all()) and ours.run() == expected


@pytest.mark.parametrize("order", ["heads_first", "slots_first", "words_first"])
def test_layer_views_lie_as_the_layout_says(runner: ModelRunner, order: str) -> None:
    layout = replace(runner.layout, order=order)  # type: ignore[arg-type]
    arena = torch.zeros((3, layout.block_bytes), dtype=torch.uint8)
    caches = layer_caches(arena, layout, runner.layer_groups)
    assert caches[1].values.shape == (3, 2, 16, 16)  # [num_blocks, kv_heads, block_size, head_dim]
    caches[1].values[2, 1, 5] = 1.0
    kv = np.flatnonzero(arena.view(torch.int16).numpy()[2])
    inner = (5 * 2 + 1) if order == "slots_first" else (1 * 16 + 5)
    assert kv.tolist() == list(range((1 * 2 + 1) * 512 + inner * 16, (1 * 2 + 1) * 512 + inner * 16 + 16))
    assert not arena[:2].any()


def test_on_a_cpu_keys_are_stored_by_word(runner: ModelRunner, tmp_path: Path) -> None:
    assert runner.layout.order == "words_first"
    arena = torch.zeros((3, runner.layout.block_bytes), dtype=torch.uint8)
    keys = layer_caches(arena, runner.layout, runner.layer_groups)[1].keys
    assert keys.shape == (3, 2, 8, 16, 2)  # [num_blocks, kv_heads, head_dim / 2, block_size, 2]
    keys[2, 1, 3, 5] = 1.0
    where = (1 * 2 + 0) * 512 + 1 * 16 * 16 + (3 * 16 + 5) * 2  # layer 1, head 1, word 3, slot 5
    assert np.flatnonzero(arena.view(torch.int16).numpy()[2]).tolist() == [where, where + 1]
    for other in ({"kv_cache_dtype": "int8"}, {"block_size": 8}):
        rows = ModelRunner(RunnerSettings(tmp_path, num_threads=1, device="cpu", **other))
        assert rows.layout.order == "heads_first"


def test_profile_grows_with_the_batch_and_leaves_the_arena_alone(tmp_path: Path) -> None:
    """The lower bound follows from the shapes: the logits of every row, in bf16 and fp32."""
    make_checkpoint(tmp_path, "llama", vocab_size=32000)
    runner = ModelRunner(RunnerSettings(tmp_path, num_threads=1, device="cpu"))
    arena = poisoned_arena(runner, 2)
    runner.bind(arena)
    small, large = start_up.profile(runner, 64, 8), start_up.profile(runner, 2048, 8)
    logits_bytes = 2048 * 32000 * (2 + 4)
    assert logits_bytes <= large < 1.5 * logits_bytes
    assert small < large / 4
    assert (arena == 0xFF).all()


def test_profile_packs_prompts_that_are_shorter_than_a_step(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", vocab_size=32000)
    runner = ModelRunner(RunnerSettings(tmp_path, num_threads=1, device="cpu", max_model_len=256))
    assert start_up.profile(runner, 2048, 8) >= 2048 * 32000 * (2 + 4) > 4 * start_up.profile(runner, 2048, 1)


def test_numerics_tell_dtype_isa_and_determinism(runner: ModelRunner, tmp_path: Path) -> None:
    fields = dict(part.split("=") for part in runner.numerics.split())
    assert fields["kv"] == "bfloat16" and fields["attention"] == f"cpu/{runner.attention.version}"
    assert fields["dtype"] == "bfloat16" and fields["isa"] and fields["deterministic"] in ("True", "False")
    other = ModelRunner(RunnerSettings(tmp_path, dtype="float32", num_threads=1, device="cpu"))
    assert other.numerics != runner.numerics and other.model_fingerprint != runner.model_fingerprint
