"""Prefill on one host, decode on another: the blocks travel, the tokens stay the same, and no block stays held after a
failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.types import SamplingParams, StoppingParams
from looseleaf import AsyncClient, Completion
from testing.chaos import pulls
from testing.chaos.book import Case, make_oracle, solve
from testing.chaos.pulls import FAULTS, HOST_LOSS, PACKAGES, PulledHosts, trial
from testing.oracle import Oracle
from testing.system import prompts
from testing.two_hosts import namespaces_work

STOPPING = StoppingParams(max_tokens=24)
SEEDED = {"temperature": 0.9, "top_p": 0.95, "seed": 7, "repetition_penalty": 1.1}
PREFIX = prompts(1, seed=40, lengths=(64, 64))[0]
PROMPTS = [
    *prompts(6, seed=41, lengths=(1, 90)),
    *prompts(1, seed=42, lengths=(16, 16)),
    *[PREFIX + tail for tail in prompts(3, seed=43, lengths=(5, 40))],
    *prompts(1, seed=44, lengths=(600, 600)),
]


@pytest.fixture(scope="module")
def hosts(checkpoint: Path) -> Iterator[PulledHosts]:
    """Two network namespaces or, where these are not permitted, two groups of processes."""
    with PulledHosts(checkpoint, namespaces=namespaces_work(), packages=PACKAGES) as running:
        yield running


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    return make_oracle(checkpoint, max_model_len=1024)


async def together(hosts: PulledHosts, wanted: list[list[int]], **options: Any) -> list[Completion]:
    async with AsyncClient(hosts.grpc) as client:
        calls = (client.generate(p, max_tokens=24, ignore_eos=True, timeout=60, **options) for p in wanted)
        return list(await asyncio.gather(*calls))


def long_cases(oracle: Oracle, seed: int) -> list[Case]:
    greedy = SamplingParams(temperature=0.0)
    return [
        solve(oracle, tuple(prompt), greedy, STOPPING.max_tokens) for prompt in prompts(6, seed=seed, lengths=(60, 150))
    ]


async def test_every_way_of_decoding_gives_the_oracles_tokens_on_another_host(
    hosts: PulledHosts, oracle: Oracle
) -> None:
    greedy = SamplingParams(temperature=0.0)
    expected = [tuple(oracle.generate(prompt, greedy, STOPPING)) for prompt in PROMPTS]
    cold = await together(hosts, PROMPTS, temperature=0.0)
    assert [done.token_ids for done in cold] == expected
    assert all(done.usage.transferred_tokens > 0 for done in cold[:7] + cold[-1:])
    assert cold[-1].usage.transferred_tokens == cold[-1].usage.handed_over_tokens == 600, "all of a cold prompt"
    again = await together(hosts, PROMPTS, temperature=0.0)
    assert [done.token_ids for done in again] == expected
    assert again[-1].usage.transferred_tokens == 600 % 16, "full blocks are cached there; a partial one has no name"

    params = SamplingParams(**SEEDED)
    seeded = await together(hosts, PROMPTS, **SEEDED, cache_salt="seeded")
    assert [done.token_ids for done in seeded] == [tuple(oracle.generate(p, params, STOPPING)) for p in PROMPTS]
    hosts.assert_nothing_held()


async def test_samples_and_beams_travel_once(hosts: PulledHosts, oracle: Oracle) -> None:
    prompt = prompts(1, seed=50, lengths=(100, 100))[0]
    before = hosts.metric("looseleaf_pulled_bytes_total")
    [one] = await together(hosts, [prompt], **SEEDED, cache_salt="one")
    bytes_of_one = hosts.metric("looseleaf_pulled_bytes_total") - before
    [four] = await together(hosts, [prompt], n=4, **SEEDED, cache_salt="four")
    assert hosts.metric("looseleaf_pulled_bytes_total") - before == 2 * bytes_of_one > 0, "bytes do not grow with n"
    assert four.samples[0].token_ids == one.token_ids and len({s.token_ids for s in four.samples}) > 1
    params = SamplingParams(**SEEDED, num_sequences=4)
    for index, sample in enumerate(four.samples):
        assert list(sample.token_ids) == oracle.generate(prompt, params, STOPPING, sample_index=index)

    [beams] = await together(hosts, [prompt], beam_width=4, n=4, cache_salt="beams")
    search = SamplingParams(temperature=0.0, beam_width=4, num_sequences=4)
    assert [s.token_ids for s in beams.samples] == [
        tuple(best.token_ids) for best in oracle.beam_search(prompt, search, STOPPING)
    ]
    hosts.assert_nothing_held()


async def test_a_second_turn_finds_its_prefix_where_it_was_decoded(hosts: PulledHosts) -> None:
    first_turn = prompts(1, seed=60, lengths=(70, 70))[0]
    [first] = await together(hosts, [first_turn], temperature=0.0, cache_salt="turns")
    second_turn = [*first_turn, *first.token_ids, 11, 12, 13]
    [second] = await together(hosts, [second_turn], temperature=0.0, cache_salt="turns")
    full = len(first_turn) + len(first.token_ids) - 1
    assert second.usage.transferred_tokens <= len(second_turn) - full // 16 * 16, "decode had sealed the rest there"


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in ("freeze-30", HOST_LOSS)])
async def test_a_fault_that_hits_a_pull_costs_a_pause(
    hosts: PulledHosts, oracle: Oracle, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -m testing.chaos --scenario pull-FAULT` repeats this, and has a slower fault. On a machine that pauses,
    the pulls may be over when the fault comes, and then there is another trial.
    """
    monkeypatch.setattr(pulls, "IDLE_S", 60.0)
    if fault == "link-cut" and hosts.spaces is None:
        pytest.skip("no network namespaces here")
    cases, num_lost = long_cases(oracle, seed=70 + len(fault)), 0
    for _ in range(3):
        done = await trial(hosts, cases, fault, deadline_s=200)
        assert done.num_under_way > 0, "the fault hit no pull"
        assert all(answer.right and answer.error is None for answer in done.answers), done.answers
        assert done.idle_after_s < float("inf"), "blocks stay held"
        num_lost += done.num_lost
        if num_lost or fault not in ("lapse", "flip", "source-kill"):
            return
    raise AssertionError("a pull of these blocks must not succeed")


async def test_a_host_that_stays_lost_leaves_nothing_held_on_the_other(
    hosts: PulledHosts, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulls, "IDLE_S", 60.0)
    cases = long_cases(oracle, seed=90)
    done = await trial(hosts, cases, HOST_LOSS, deadline_s=20)
    assert done.num_under_way > 0, "the loss hit no pull"
    assert all(answer.right for answer in done.answers) and any(answer.error for answer in done.answers)
    assert done.idle_after_s < float("inf"), "blocks stay held on A"
    after = await together(hosts, [list(case.prompt_ids) for case in cases], temperature=0.0, cache_salt="after")
    assert [(answer.token_ids,) for answer in after] == [case.expected for case in cases]
    hosts.assert_nothing_held()
