"""The engine on a GPU: bits in any batch, CUDA graphs, every installed provider, two streams at once."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from common.types import SamplingParams, StoppingParams
from engine import start_up
from engine.config import Family
from engine.errors import ModelError
from engine.model_runner import ModelRunner, RunnerSettings
from engine.sampler import SampleRow, sample_rows
from engine.tiny import make_checkpoint
from kernels.cpu import fallbacks
from kernels.providers.choice import ProviderName
from testing.engine import Batch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

FAMILIES: list[Family] = ["llama", "mistral", "qwen2", "qwen3", "opt"]
PROMPTS = [[5], list(range(6, 21)), list(range(7, 24)), list(range(5, 305))]
NEW_TOKENS = 20
ON_GPU: dict[str, Any] = {"device": "cuda", "max_model_len": 512}


def runner_of(directory: Path, family: Family, **settings: Any) -> ModelRunner:
    """Returns a runner for a tiny model with heads of 64, which every provider supports."""
    if not (directory / "config.json").exists():
        sizes = {"hidden_size": 256} if family == "opt" else {"head_dim": 64}
        make_checkpoint(directory, family, seed=11, std=0.1, **sizes)
    return ModelRunner(RunnerSettings(directory, **(ON_GPU | settings)))


def bits(batch: Batch) -> list[torch.Tensor]:
    batch.run()
    return [torch.stack(rows) for rows in batch.logits]


def captured(runner: ModelRunner, prompts: list[list[int]], **options: Any) -> Batch:
    """Returns a batch whose decode steps are replayed from graphs for buckets 1, 2, 4 and 8."""
    batch = Batch.of(runner, prompts, NEW_TOKENS, **options)
    before = fallbacks().get("decode graph", 0)
    start_up.capture(runner, 8)
    assert fallbacks().get("decode graph", 0) == before, "a graph could not be captured"
    return batch


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_deterministic_bits_in_every_company(family: Family, dtype: str, tmp_path: Path) -> None:
    """Promise 1 in the engine: the bits are the same alone, in a batch, in chunks of any size, and with padding in a
    graph.
    """
    runner = runner_of(tmp_path, family, dtype=dtype, deterministic=True)
    assert "deterministic=True" in runner.numerics
    alone = [bits(Batch.of(runner, [p], NEW_TOKENS, budget=4096))[0] for p in PROMPTS]
    for budget, seed in ((64, 1), (7, 2), (4096, 3)):
        for batch in (Batch.of(runner, PROMPTS, NEW_TOKENS, budget=budget, seed=seed), captured(runner, PROMPTS)):
            assert all(torch.equal(a, b) for a, b in zip(alone, bits(batch), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_tokens_are_those_of_the_cpu(family: Family, tmp_path: Path) -> None:
    on_cpu = runner_of(tmp_path, family, dtype="float32", device="cpu")
    expected = Batch.of(on_cpu, PROMPTS, NEW_TOKENS)
    expected.run()
    got = captured(runner_of(tmp_path, family, dtype="float32", attention_backend="triton"), PROMPTS)
    assert got.run() == [s.output_ids for s in expected.sequences]
    for ours, theirs in zip(got.logits, expected.logits, strict=True):
        assert torch.allclose(torch.stack(ours).cpu(), torch.stack(theirs), atol=1e-3)


@pytest.mark.parametrize("name", [name for name in get_args(ProviderName) if name != "cpu"])
@pytest.mark.parametrize("window", [None, 64])
def test_every_provider_that_is_here_is_near_the_cpu(name: str, window: int | None, tmp_path: Path) -> None:
    """Compares prefill and, if the first token was the same, a decode step, both eager and from a graph."""
    make_checkpoint(tmp_path, "mistral", seed=11, std=0.1, head_dim=64, sliding_window=window)
    block_size = 256 if name == "fa2" else 16
    on_cpu = runner_of(tmp_path, "mistral", device="cpu", block_size=block_size)
    expected = bits(Batch.of(on_cpu, PROMPTS, 2))
    library = os.environ.get("FA3_LIBRARY") if name == "fa3" else None
    try:
        runner = runner_of(
            tmp_path, "mistral", attention_backend=name, attention_library=library, block_size=block_size
        )
    except ModelError as error:
        pytest.skip(str(error))
    for batch in (Batch.of(runner, PROMPTS, 2), captured(runner, PROMPTS)):
        got = [rows.cpu() for rows in bits(batch)]
        same = [i for i, rows in enumerate(got) if int(rows[0].argmax()) == int(expected[i][0].argmax())]
        assert len(same) > len(PROMPTS) // 2
        for i, rows in enumerate(got):
            for ours, theirs in zip(rows[: 1 + (i in same)], expected[i], strict=False):
                assert float((ours - theirs).square().mean().sqrt() / theirs.std()) < 0.05
    assert (runner.binding.graphs is not None) == runner.attention.capturable


def test_two_runners_step_at_once_over_one_set_of_weights(tmp_path: Path) -> None:
    first = runner_of(tmp_path, "llama", deterministic=True)
    expected = Batch.of(first, PROMPTS, NEW_TOKENS).run()
    second = ModelRunner.sharing(first)
    batches = [captured(first, PROMPTS), Batch.of(second, PROMPTS, NEW_TOKENS, budget=16)]
    threads = [threading.Thread(target=batch.run) for batch in batches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for batch in batches:
        assert [sequence.output_ids for sequence in batch.sequences] == expected


@pytest.mark.parametrize("deterministic", [False, True])
def test_nothing_is_compiled_while_serving(deterministic: bool, tmp_path: Path) -> None:
    """`test_variants.py` tests this without a GPU, but without graphs."""
    runner = runner_of(tmp_path, "llama", attention_backend="triton", deterministic=deterministic)
    start_up.profile(runner, 64, 8, graphs=True)
    batch = captured(runner, PROMPTS)
    known = num_variants()
    batch.run()
    Batch.of(runner, PROMPTS * 3, NEW_TOKENS, budget=7).run()
    logits = batch.logits[0][0][None]
    sample_rows(logits, [SampleRow(SamplingParams(logprobs=3), StoppingParams(), [1], [2], 0, 1)])
    runner.copy_blocks([0, 1, 2], [5, 4, 3])
    assert num_variants() == known > 0


def num_variants() -> int:
    """Returns the number of variants of all kernels that this process has compiled."""
    import triton

    modules = [module for name, module in sys.modules.items() if name.startswith("kernels.gpu.")]
    found = {f for module in modules for f in vars(module).values() if isinstance(f, triton.JITFunction)}
    return sum(len(caches[0]) for kernel in found for caches in kernel.device_caches.values())


def test_tokens_are_drawn_as_on_the_cpu(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn((6, 1000), generator=generator) * 3
    params = [
        SamplingParams(temperature=0.0, logprobs=2),
        SamplingParams(seed=1),
        SamplingParams(seed=2, temperature=0.7, top_k=40),
        SamplingParams(seed=3, top_p=0.8, logprobs=5),
        SamplingParams(seed=4, min_p=0.05, repetition_penalty=1.3, presence_penalty=0.2),
        SamplingParams(seed=5, logit_bias=((17, 4.0), (18, -100.0)), frequency_penalty=0.5),
    ]
    stopping = StoppingParams(min_tokens=5, stop_token_ids=(2,))
    rows = [SampleRow(p, stopping, [1, 2, 3, 900], [17, 17, 5], 1, 3) for p in params]
    expected, got = sample_rows(logits, rows), sample_rows(logits.cuda(), rows)
    assert [s.token_id for s in got] == [s.token_id for s in expected]
    for ours, theirs in zip(got, expected, strict=True):
        if theirs.logprob is not None and ours.logprob is not None:
            assert [t for t, _ in ours.logprob.top] == [t for t, _ in theirs.logprob.top]
            assert ours.logprob.logprob == pytest.approx(theirs.logprob.logprob, abs=1e-5)


def test_profile_sees_activations_and_graphs(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", head_dim=64, vocab_size=32000)
    runner = runner_of(tmp_path, "llama")
    small, large, with_graphs = (
        start_up.profile(runner, 16, 8),
        start_up.profile(runner, 512, 64),
        start_up.profile(runner, 512, 64, graphs=True),
    )
    assert small < large and large >= 512 * 32000 * (2 + 4)
    assert with_graphs >= large


def test_an_fp8_cache_decodes(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, "llama", kv_cache_dtype="fp8_e4m3", deterministic=True)
    eager, replayed = bits(Batch.of(runner, PROMPTS, NEW_TOKENS)), bits(captured(runner, PROMPTS))
    assert all(torch.equal(a, b) for a, b in zip(eager, replayed, strict=True))
    exact = bits(Batch.of(runner_of(tmp_path, "llama", deterministic=True), PROMPTS, 1))
    for rounded, plain in zip(eager, exact, strict=True):
        assert float((rounded[0] - plain[0]).square().mean().sqrt() / plain[0].std()) < 0.3
