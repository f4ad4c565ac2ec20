"""Random requests in random arenas, with random preemptions and kills, get the oracle's answers. There are six seeds,
or N with LOOSELEAF_TEST_WORLDS=N. Each takes about a second.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from block_store.server.sizing import granted_floor
from common.group_need import floor_of
from common.kv_retention import KvRules
from common.types import SamplingParams, StoppingParams
from decode_svc.preemption import Choice
from engine.model_runner import ModelRunner, RunnerSettings
from engine.tiny import make_checkpoint
from testing.equality.cases import Case, differences, expect
from testing.equality.workers import NO_FLOORS, Workers, need_of
from testing.oracle import Oracle
from testing.zoo import ZOO, make_foreign

VOCAB = 500
CHOICES: tuple[Choice, ...] = ("swap", "give-back", "auto")
NUM_WORLDS = int(os.environ.get("LOOSELEAF_TEST_WORLDS", "6"))


@pytest.fixture(scope="module", params=["full attention", "windows", "both", "states"])
def runners(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[ModelRunner]:
    """Runners with blocks of 4, 8 and 16, for models with full attention, with windows, with both, or with recurrent
    states.
    """
    directory = tmp_path_factory.mktemp("model")
    match request.param:
        case "full attention":
            model = make_checkpoint(directory, "qwen3", seed=9, dtype=torch.bfloat16)
        case "windows":
            model = make_checkpoint(directory, "mistral", seed=9, dtype=torch.bfloat16, sliding_window=13)
        case other:
            name = "gemma3" if other == "both" else "bamba"
            model = make_foreign(directory, ZOO[name], seed=9, dtype=torch.bfloat16)
    settings = {"num_threads": 1, "max_model_len": 256, "device": "cpu"}
    return [ModelRunner(RunnerSettings(model, block_size=size, **settings)) for size in (4, 8, 16)]  # type: ignore[arg-type]


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(10, VOCAB) for _ in range(count)]


def random_sampling(rng: random.Random) -> SamplingParams:
    common: dict[str, Any] = {
        "seed": rng.randrange(1000),
        "logprobs": rng.choice((None, 0, 2)),
        "repetition_penalty": rng.choice((1.0, 1.2)),
        "frequency_penalty": rng.choice((0.0, 0.4)),
    }
    if rng.random() < 0.35:
        width = rng.choice((2, 3, 4))
        return SamplingParams(
            temperature=0.0, beam_width=width, num_sequences=rng.randint(1, width),
            length_penalty=rng.choice((0.6, 1.0, 2.0)), early_stopping=rng.choice((True, False, "never")), **common,
        )  # fmt: skip
    return SamplingParams(
        temperature=rng.choice((0.0, 0.7, 1.2)), num_sequences=rng.choice((1, 1, 2, 4, 6)), top_k=rng.choice((0, 5)),
        **common,
    )  # fmt: skip


def random_stopping(rng: random.Random) -> StoppingParams:
    max_tokens = rng.choice((1, 2, 7, 16, 17, 30))
    return StoppingParams(
        max_tokens, min(max_tokens, rng.choice((0, 0, 3))), tuple(tokens(rng, rng.choice((0, 2, 10))))
    )


def random_cases(rng: random.Random, block_size: int) -> list[Case]:
    """Returns cases whose prompts have one of two prefixes, so that many of them share blocks."""
    heads = [tokens(rng, rng.choice((3, block_size, 2 * block_size, 40))) for _ in range(2)]
    prompts = [(*rng.choice(heads), *tokens(rng, rng.randint(0, 20))) for _ in range(rng.randint(2, 7))]
    return [Case(str(i), prompt, random_sampling(rng), random_stopping(rng)) for i, prompt in enumerate(prompts)]


def room_for(cases: list[Case], rules: KvRules) -> tuple[int, dict[str, int]]:
    """Returns the size of the smallest arena in which these requests are accepted, and the floors that the store grants
    in it.
    """
    longest = max(len(case.prompt) + case.stopping.max_tokens for case in cases)
    prefill, decode = floor_of("prefill", longest, rules), floor_of("decode", longest, rules)
    num_blocks = prefill + decode
    while (granted := granted_floor(decode, "decode", num_blocks, 2)) < max(need_of(c).blocks(rules) for c in cases):
        num_blocks += 1
    return num_blocks, {"prefill": prefill, "decode": granted}


@pytest.mark.parametrize("seed", range(NUM_WORLDS))
def test_a_random_world_answers_as_the_oracle(
    runners: list[ModelRunner], redis_client: Any, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    runner = rng.choice(runners)
    block_size = runner.layout.block_size
    cases = random_cases(rng, block_size)
    budget = rng.choice((5, 16, 33, 512))
    num_blocks, floors = room_for(cases, runner.layout.rules(budget))
    if rng.random() < 0.5:
        num_blocks, floors = num_blocks + rng.choice((1, 5, 20, 200)), rng.choice((NO_FLOORS, floors))
    kills = set(rng.sample(range(2, 60), rng.choice((0, 0, 1, 2))))
    workers = Workers(
        runner,
        tmp_path,
        redis_client,
        num_blocks=num_blocks,
        budget=budget,
        floors=floors,
        preemption=rng.choice(CHOICES),
    )

    def kill(them: Workers) -> None:
        if them.num_steps in kills:
            them.kill_decode()

    expected = [expect(Oracle(runner), case) for case in cases]
    for _ in ("cold", "cached"):
        found = [asked.answer for asked in workers.answer(cases, before_step=kill)]
        assert not (wrong := differences(cases, expected, found)), "\n".join(wrong)
    workers.assert_idle()
    workers.close()
