"""Explanations of random requests on a real stack: their numbers add up, whatever happened to the requests."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from looseleaf import LLM, AsyncClient
from looseleaf.cli import main
from looseleaf.commands.explain import lines
from looseleaf.explanation import Explanation
from looseleaf.results import Completion
from testing.system import prompts

TIMES = {
    "queue_ns": ("gate", "prefill_queue", "come_back"),
    "prefill_ns": ("prefill",),
    "hand_over_ns": ("hand_over", "pull"),
    "decode_ns": ("decode_queue", "decode", "swapped"),
}
"""The phases that each of the reported times sums up."""
MOST_ROUNDS = 12
"""Maximum number of rounds of requests until one of them is preempted. Two rounds nearly always suffice."""


@pytest.fixture(scope="module", params=["swap", "give-back"])
def crowded(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[LLM]:
    """A system with too few blocks for the requests that run at once."""
    settings = {"num_blocks": 96, "max_model_len": 384, "max_num_seqs": 16, "roles": "both"}
    with LLM(str(checkpoint), **settings, preemption=request.param) as running:
        yield running


def wanted(rng: random.Random, shared: list[int]) -> tuple[list[int], dict[str, Any]]:
    """Returns a random prompt, often with a shared prefix, and random options."""
    prompt = shared * rng.randint(0, 1) + prompts(1, seed=rng.randrange(1 << 30), lengths=(1, 60))[0]
    options: dict[str, Any] = {"max_tokens": rng.randint(1, 150), "ignore_eos": rng.random() < 0.7}
    match rng.choice(("greedy", "sampled", "samples", "beams")):
        case "sampled":
            options |= {"temperature": 1.0, "seed": rng.randrange(1 << 30)}
        case "samples":
            options |= {"temperature": 1.0, "n": rng.randint(2, 4), "max_tokens": rng.randint(1, 60)}
        case "beams":
            options |= {"beam_width": rng.randint(2, 3), "max_tokens": rng.randint(1, 40)}
    return prompt, options


async def run_all(llm: LLM, seed: int, count: int) -> list[tuple[Completion, Explanation]]:
    rng, shared = random.Random(seed), prompts(1, seed=seed, lengths=(64, 64))[0]
    async with AsyncClient(llm.addresses.grpc) as client:

        async def one(prompt: list[int], options: dict[str, Any]) -> tuple[Completion, Explanation]:
            done = await client.generate(prompt, **options)
            [told] = await client.explain(done.request_id)
            return done, told

        return await asyncio.gather(*(one(*wanted(rng, shared)) for _ in range(count)))


def check(done: Completion, told: Explanation) -> None:
    """Checks that the parts add up to the usage, the times and the length of the request."""
    assert told.usage == done.usage and told.timings == done.timings
    attempts, usage = told.attempts, done.usage
    assert abs(sum(phase.duration_ns for phase in told.phases) - told.total_ns) <= 0.02 * told.total_ns
    assert sum(attempt.output_tokens for attempt in attempts) == usage.completion_tokens
    assert (attempts[0].sources.cached, attempts[0].sources.computed) == (usage.cached_tokens, usage.computed_tokens)
    assert {phase.attempt for phase in told.phases} <= set(range(len(attempts) + 1))
    assert [attempt.end for attempt in attempts] == ["given_back"] * (len(attempts) - 1) + ["done"]
    for name, kinds in TIMES.items():
        phases = sum(phase.duration_ns for phase in told.phases if phase.kind in kinds)
        assert abs(phases - getattr(told.timings, name)) <= 0.02 * told.total_ns, "\n".join([name, *lines(told)])
    for attempt in attempts:
        assert attempt.prefill_considered[0].worker_id == attempt.prefill_worker
        assert attempt.handed_over_blocks >= len(set(attempt.blocks)) == len(attempt.blocks)
        assert len(attempt.generations) == len(attempt.blocks)
        assert attempt.handed_over_blocks * 16 >= attempt.handed_over_tokens
        assert attempt.swapped_in_blocks <= attempt.swapped_out_blocks


async def test_the_numbers_add_up_to_usage_and_time(crowded: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    found: list[tuple[Completion, Explanation]] = []
    kinds: set[str] = set()
    for seed in range(MOST_ROUNDS):
        found += await run_all(crowded, seed, 24)
        kinds = {phase.kind for _, told in found for phase in told.phases}
        if seed and kinds & {"swapped", "come_back"}:
            break
    for done, told in found:
        check(done, told)
    assert kinds & {"swapped", "come_back"}, "no request was preempted"
    assert any(done.usage.cached_tokens for done, _ in found) and any(
        told.attempts[0].copied_blocks for _, told in found
    )
    longest = max((told for _, told in found[-24:]), key=lambda told: len(told.phases))
    assert await asyncio.to_thread(main, ["explain", longest.request_id, "--address", crowded.addresses.grpc]) == 0
    report = capsys.readouterr().out
    assert report.startswith(f"{longest.request_id}: {longest.outcome} after") and "prefill on worker.prefill" in report
