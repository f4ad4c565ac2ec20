"""Embeddings by a prefill worker: the same bits in any batch and in any chunks, close to transformers, no
blocks held.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import InvalidArgument
from common.types import Branch, Pooling, SamplingParams, StoppingParams
from engine.config import Family
from engine.model_runner import ModelRunner, RunnerSettings
from engine.sequence import Chunk, lay_out
from engine.tiny import make_checkpoint
from prefill_svc.events import Done
from prefill_svc.job import Job
from prefill_svc.pooling import Pool
from prefill_svc.requests import RequestLimits, job_of
from protos.v1 import prefill_pb2, types_pb2
from testing.engine import Batch

STOPPING = StoppingParams(max_tokens=4, stop_token_ids=(2,))
LONG = [3 + i * 7 % 500 for i in range(150)]
PROMPTS = [LONG, LONG[:33], [5], LONG[40:90]]
POOLINGS: tuple[Pooling, ...] = ("last", "mean")


def embed_job(prompt: list[int], pooling: Pooling) -> Job:
    job = Job.of(prompt, [Branch()], SamplingParams(), STOPPING)
    job.trunk.pooling, job.pool = pooling, Pool(pooling)
    return job


def embedded(world: Any, jobs: list[Job], salt: bytes = b"") -> list[Done]:
    events: list[list[Any]] = [[] for _ in jobs]
    for job, heard in zip(jobs, events, strict=True):
        world.worker.submit(job, salt, heard.append)
    world.run(*events)
    return [heard[-1] for heard in events]


def states_of(runner: ModelRunner, prompt: list[int]) -> torch.Tensor:
    """Returns the hidden states of a prompt, computed alone in one chunk."""
    sequence = Batch.of(runner, [prompt], 1).sequences[0]
    sequence.pooling = "mean"
    return runner.hidden_states(lay_out([Chunk(sequence, len(prompt))], runner.layout.block_size).batch)


@pytest.mark.parametrize("budget", [512, 64, 17])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_an_embedding_has_the_same_bits_alone_and_in_a_batch_and_for_any_chunks(
    runner: ModelRunner, make_world: Callable[..., Any], pooling: Pooling, budget: int
) -> None:
    alone = []
    for prompt in PROMPTS:
        pool = Pool(pooling)
        pool.add(states_of(runner, prompt).numpy())
        alone.append(pool.vector())
    assert len({tuple(vector) for vector in alone}) == len(PROMPTS)
    world = make_world(budget=budget)
    drawing = world.submit(LONG[::-1], [Branch()], SamplingParams(temperature=0.0), STOPPING)
    found = embedded(world, [embed_job(prompt, pooling) for prompt in PROMPTS])
    assert [done.embedding for done in found] == alone
    assert all(done.ticket is None and not done.tokens for done in found)
    world.run(drawing)
    world.claimer.release(world.claim(drawing[-1].ticket))


def test_only_the_last_state_may_use_a_cached_prefix(make_world: Callable[..., Any]) -> None:
    world = make_world()
    for pooling, cached in (("last", 0), ("last", 144), ("mean", 0), ("mean", 0)):
        done = embedded(world, [embed_job(LONG, pooling)])[0]
        assert (done.sources.cached, done.sources.computed) == (cached, len(LONG) - cached)
        [fresh] = embedded(world, [embed_job(LONG, pooling)], salt=f"{pooling} {cached}".encode())
        assert done.embedding == fresh.embedding and (fresh.sources.cached == 0 or pooling == "mean")


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt"])
def test_hidden_states_are_those_of_transformers(family: Family, tmp_path: Path) -> None:
    from transformers import AutoModel

    more = {"do_layer_norm_before": False, "word_embed_proj_dim": 32} if family == "opt" else {}
    make_checkpoint(tmp_path, family, **more)
    ours = states_of(ModelRunner(RunnerSettings(tmp_path, dtype="float32", num_threads=1, device="cpu")), LONG)
    model = AutoModel.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        theirs = model(torch.tensor([LONG])).last_hidden_state[0]
    assert (ours - theirs).abs().max() < 1e-3 * theirs.std()
    pool, mean = Pool("mean"), theirs.double().mean(dim=0)
    pool.add(ours.numpy())
    assert torch.tensor(pool.vector()).double() @ (mean / mean.norm()) > 1 - 1e-6


def test_a_worker_checks_what_it_is_asked_for() -> None:
    limits = RequestLimits(max_model_len=256, vocab_size=512, max_num_seqs=16)
    sampling = types_pb2.SamplingParams(num_sequences=1)
    request = prefill_pb2.PrefillRequest(prompt_token_ids=[5, 6], branches=[types_pb2.Branch()], sampling=sampling)
    request.stopping.max_tokens = 1
    request.pooling = types_pb2.POOLING_MEAN
    assert job_of(request, limits).trunk.pooling == "mean"
    request.branches[0].output_token_ids.append(7)
    with pytest.raises(InvalidArgument, match="branches"):
        job_of(request, limits)
