"""Blocks of a prompt travel to the host of decode while prefill computes the rest of the prompt. The tokens and the
accounts stay the same, and no block stays held after a fault.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.types import SamplingParams, StoppingParams
from engine.model_runner import ModelRunner, RunnerSettings
from looseleaf import AsyncClient, Completion
from looseleaf.options import GenerateOptions
from testing.chaos import pulls
from testing.chaos.book import Case
from testing.chaos.pulls import EARLY_FLAGS, IDLE_S, PACKAGES, PulledHosts, trial
from testing.oracle import Oracle
from testing.system import prompts, wait_for
from testing.two_hosts import namespaces_work

GREEDY = SamplingParams(temperature=0.0)
STEP_S = 0.15


@pytest.fixture(scope="module")
def hosts(checkpoint: Path) -> Iterator[PulledHosts]:
    """Two network namespaces or, where these are not permitted, two groups of processes. Prefill takes 32 tokens in a
    step, and an early ticket holds 16 tokens or more.
    """
    with PulledHosts(checkpoint, namespaces=namespaces_work(), packages=PACKAGES, flags=EARLY_FLAGS) as running:
        yield running


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    settings = RunnerSettings(model=str(checkpoint), max_model_len=1024, num_threads=1, deterministic=True)
    return Oracle(ModelRunner(settings))


async def ask(hosts: PulledHosts, wanted: list[list[int]], **options: object) -> list[Completion]:
    asked = GenerateOptions(max_tokens=16, temperature=0.0, ignore_eos=True, timeout=60)
    asked.update(options)  # type: ignore[typeddict-item]
    async with AsyncClient(hosts.grpc) as client:
        return list(await asyncio.gather(*(client.generate(prompt, **asked) for prompt in wanted)))


def early_ends(hosts: PulledHosts) -> dict[str, float]:
    """Returns the number of early pulls by their end."""
    return hosts.metric_by("looseleaf_early_pulls_total", "end")


async def test_most_of_a_prompt_travels_before_prefill_ends(hosts: PulledHosts, oracle: Oracle) -> None:
    wanted = prompts(4, seed=1, lengths=(150, 300))
    stopping = StoppingParams(max_tokens=16)
    with hosts.slow_prefill(STEP_S):
        [first] = await ask(hosts, wanted[:1])
        early = hosts.metric("looseleaf_early_pulled_tokens_total")
        assert first.usage.transferred_tokens == first.usage.handed_over_tokens == len(wanted[0]), "each block once"
        assert len(wanted[0]) - 64 <= early < len(wanted[0]), "all but the last steps' tokens"
        others = await ask(hosts, wanted[1:])
        again = await ask(hosts, wanted)
    answers = [first, *others]
    assert [done.token_ids for done in answers] == [tuple(oracle.generate(p, GREEDY, stopping)) for p in wanted]
    assert [done.usage.transferred_tokens for done in answers] == list(map(len, wanted))
    assert [done.token_ids for done in again] == [done.token_ids for done in answers]
    assert [done.usage.transferred_tokens for done in again] == [len(p) % 16 for p in wanted], "full blocks are cached"
    assert not early_ends(hosts)["failed"], "no early pull failed"
    hosts.assert_nothing_held()


async def test_samples_and_beams_share_the_blocks_that_came_early(hosts: PulledHosts, oracle: Oracle) -> None:
    [prompt] = prompts(1, seed=2, lengths=(200, 200))
    stopping = StoppingParams(max_tokens=16)
    seeded = {"temperature": 0.9, "seed": 7}
    params = SamplingParams(temperature=0.9, seed=7, num_sequences=4)
    with hosts.slow_prefill(STEP_S):
        [four] = await ask(hosts, [prompt], n=4, cache_salt="four", **seeded)
        [beams] = await ask(hosts, [prompt], n=4, beam_width=4, cache_salt="beams")
    for index, sample in enumerate(four.samples):
        assert list(sample.token_ids) == oracle.generate(prompt, params, stopping, sample_index=index)
    search = SamplingParams(temperature=0.0, beam_width=4, num_sequences=4)
    best = [tuple(beam.token_ids) for beam in oracle.beam_search(prompt, search, stopping)]
    assert [sample.token_ids for sample in beams.samples] == best
    assert four.usage.transferred_tokens == beams.usage.transferred_tokens == 200
    hosts.assert_nothing_held()


async def test_a_request_that_is_cancelled_during_an_early_pull_leaves_nothing(hosts: PulledHosts) -> None:
    stopped = early_ends(hosts)["stopped"]
    with hosts.paced(STEP_S):
        asking = asyncio.create_task(ask(hosts, prompts(3, seed=3, lengths=(200, 300))))
        await asyncio.to_thread(wait_for, hosts.num_early, lambda count: count > 0, 30.0, "no early pull")
        asking.cancel()
        await asyncio.wait([asking])
        await asyncio.to_thread(hosts.assert_nothing_held, IDLE_S)
    assert early_ends(hosts)["stopped"] > stopped, "the cancel came during a copy"


@pytest.mark.parametrize("fault", ["source-kill", "prefill-kill", "redis-flush", "lapse", "flip", "destination-kill"])
async def test_a_fault_that_hits_an_early_pull_costs_a_pause(
    hosts: PulledHosts, oracle: Oracle, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -m testing.chaos --scenario pull-early-FAULT` repeats this, and has further faults."""
    monkeypatch.setattr(pulls, "IDLE_S", 60.0)
    cases = [
        Case(tuple(prompt), GREEDY, 24, (tuple(oracle.generate(prompt, GREEDY, StoppingParams(max_tokens=24))),))
        for prompt in prompts(6, seed=80 + len(fault), lengths=(100, 160))
    ]
    done = await trial(hosts, cases, fault, deadline_s=200, early=True)
    assert done.num_early > 0, "the fault hit no early pull"
    assert all(answer.right and answer.error is None for answer in done.answers), done.answers
    assert done.idle_after_s < float("inf"), "blocks stay held"
