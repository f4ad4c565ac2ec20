"""Both workers with random requests, cancels, lost answers, rebuilds, fences and thefts of blocks. After every move,
the ledger's invariants hold. At the end, every request that was not cancelled has the oracle's tokens, and no block is
held or lost. `make model-check` runs more examples.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from common.types import BlockRef, SamplingParams, StoppingParams
from decode_svc.preemption import Choice
from engine.model_runner import ModelRunner, RunnerSettings
from engine.step import StepInput
from engine.tiny import make_checkpoint
from testing.equality.cases import Answer, Case, differences, expect
from testing.equality.meddler import Meddler, When
from testing.equality.rough import Phase, Request, Role, RoughWorld
from testing.equality.workers import need_of
from testing.oracle import Oracle
from testing.zoo import ZOO, make_foreign
from tests.model_check import SHARDS, explore

BLOCK_SIZE = 4
WORLDS = int(os.environ.get("MODEL_CHECK_WORLDS", "2"))
GREEDY = SamplingParams(temperature=0.0, logprobs=1)
KINDS = (
    GREEDY,
    SamplingParams(temperature=1.0, seed=5, num_sequences=3, logprobs=1),
    GREEDY,
    SamplingParams(temperature=0.0, num_sequences=2, beam_width=2, logprobs=1),
)
HEADS = (tuple(range(20, 20 + 2 * BLOCK_SIZE)), tuple(range(40, 40 + 5)))
CASES = [
    Case(f"{kind} {head} {tail}", (*HEADS[head], *range(60, 60 + tail)), KINDS[kind], StoppingParams(9, 9))
    for head in range(2)
    for tail in (0, 3, 14)
    for kind in range(4)
]
LARGEST = [need_of(case) for case in CASES]
SPARE_BLOCKS = (0, 20, 70)
"""Numbers of blocks per KV group beyond those that the largest request needs."""
NUMBER, DRAW = st.integers(0, 30), st.randoms(use_true_random=True)
ROLES: tuple[Role, ...] = ("prefill", "decode")
PHASES: tuple[Phase, ...] = ("queued", "prefilled", "parked", "under way", "claimed", "decoded")
EVENTS = (
    "cancel", "cancel of a sample", "fence", "redis", "theft", "end of the session", "tickets", "death", "nothing",
)  # fmt: skip
BACKGROUND = ("beat", "heal", "heal", "sweep", "redis", "fence", "tickets", "theft")
FLOORS = {"hits": 20, "rebuild": 5, "LOST": 3, "prefill aborts": 3, "answers lost": 5, "finished": 40}
"""The minimum number of occurrences of each event in the whole run. A machine that rarely reaches deep states finds no
bugs.
"""


@pytest.fixture(scope="module", params=["llama", "gemma3", "bamba"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    """A runner of a model with one KV group, with four (one with full attention, three with a window of two blocks), or
    with states.
    """
    directory = tmp_path_factory.mktemp("model")
    if request.param == "llama":
        model = make_checkpoint(directory, "llama", dtype=torch.bfloat16)
    elif request.param == "bamba":
        model = make_foreign(directory, ZOO["bamba"], dtype=torch.bfloat16)
    else:
        animal = ZOO["gemma3"]
        narrow = replace(animal, changes=animal.changes | {"sliding_window": 2 * BLOCK_SIZE})
        model = make_foreign(directory, narrow, dtype=torch.bfloat16)
    return ModelRunner(RunnerSettings(model, num_threads=1, max_model_len=64, device="cpu", block_size=BLOCK_SIZE))


@pytest.fixture(scope="module")
def expected(runner: ModelRunner) -> dict[str, Answer]:
    oracle = Oracle(runner)
    return {case.name: expect(oracle, case) for case in CASES}


def happen(world: RoughWorld, draw: random.Random, phase: Phase, event: str) -> None:
    """Starts a request, and causes an event in one of its phases. Afterwards, the ledger may or may not
    answer again.
    """
    world.ask(draw.choice(CASES), draw.choice((b"", b"", b"other")))
    request = world.requests[-1]
    world.bring(request, phase, draw.randrange(3))
    role: Role = "prefill" if request.job is not None else "decode"
    world.seen[f"{event} while {world.phase(request)}"] += 1
    match event:
        case "cancel":
            world.cancel(request)
        case "cancel of a sample":
            world.cancel_sample(request, draw.randrange(3))
        case "end of the session":
            world.session_ends()
        case "death":
            world.kill_decode()
        case _:
            befall(world, draw, event, role)
    if draw.random() < 0.5:
        world.heal()
    if draw.random() < 0.5:  # its client retries
        world.ask(request.case, request.salt)


def befall(world: RoughWorld, draw: random.Random, event: str, role: Role) -> None:
    """Causes an event that is independent of requests."""
    match event:
        case "beat":
            world.attachments[role].beat()
        case "heal":
            world.attachments[role].line.heal()
            world.attachments[role].beat()
        case "sweep":
            world.sweep()
        case "redis":
            world.lose_redis()
            if draw.random() < 0.5:
                world.sweep()
        case "fence":
            world.fence(role)
        case "tickets":
            world.expire_tickets()
        case "theft":
            steal(world, draw, role)


def steal(world: RoughWorld, draw: random.Random, role: Role) -> None:
    """Steals a block that a worker holds, between two steps or during a step."""
    refs, when = list(world.attachments[role].held._counts), draw.choice((None, *get_args(When)))
    if when is None:
        return world.steal(draw.choice(refs)) if refs else None

    def pick(batch: StepInput) -> int:
        row = draw.randrange(len(batch.context_lens))
        table = draw.choice(batch.block_tables)
        return int(table[row][draw.randrange(-(-int(batch.context_lens[row]) // BLOCK_SIZE))])

    meddler = Meddler(world.runner, lambda block: world.steal(BlockRef(block, 0)), when, pick)
    meddler.is_armed = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.runner, "step", meddler)
        (world.prefill if role == "prefill" else world.decode).step()


def finish(world: RoughWorld, expected: dict[str, Answer], seen: Counter[str]) -> None:
    """Checks that every request that was not cancelled has the oracle's tokens, and that no block is held."""
    for request in world.finish():
        kept = [text for i, text in enumerate(expected[request.case.name]) if i not in request.dropped]
        found = [text for i, text in sorted(request.texts.items()) if i not in request.dropped]
        assert not (wrong := differences([request.case], [kept], [found])), wrong
        seen["finished"] += 1
    seen.update(world.seen)
    seen["answers lost"] += sum(attachment.line.num_lost for attachment in world.attachments.values())


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("how", ["swap", "give-back"])
def test_each_event_in_each_phase(
    runner: ModelRunner, redis_client: Any, expected: dict[str, Answer], shm: Path, phase: Phase, how: Choice
) -> None:
    """Other requests with other events run at the same time, in a different order in each world."""
    seen: Counter[str] = Counter()
    for seed in range(WORLDS):
        draw = random.Random(f"{phase} {how} {seed}")
        world = RoughWorld(
            runner, shm / str(seed), redis_client, preemption=how, spare_blocks=draw.choice(SPARE_BLOCKS),
            reserve=draw.choice((0, 2)), largest=LARGEST,
        )  # fmt: skip
        try:
            for event in draw.sample(EVENTS, len(EVENTS)):
                happen(world, draw, phase, event)
                world.check()
                for _ in range(4):
                    world.pump()
            finish(world, expected, seen)
        finally:
            world.close()
    missing = [event for event in EVENTS if not seen[f"{event} while {phase}"]]
    assert len(missing) <= len(EVENTS) // 2, f"never while {phase}: {missing}; {seen}"


def make_machine(
    runner: ModelRunner, client: Any, expected: dict[str, Answer], seen: Counter[str]
) -> type[RuleBasedStateMachine]:
    class Machine(RuleBasedStateMachine):
        world: RoughWorld | None = None

        @initialize(spare=st.sampled_from(SPARE_BLOCKS), how=st.sampled_from(("swap", "give-back")), reserve=NUMBER)
        def start(self, spare: int, how: Choice, reserve: int) -> None:
            self.directory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="ll-test-"))
            self.world = RoughWorld(
                runner, self.directory, client, preemption=how, spare_blocks=spare, reserve=(0, 0, 2)[reserve % 3],
                largest=LARGEST,
            )  # fmt: skip

        @property
        def there(self) -> RoughWorld:
            assert self.world is not None
            return self.world

        def pick(self, which: int, fits: Callable[[Request], bool]) -> Request | None:
            found = [request for request in self.there.requests if not request.is_over and fits(request)]
            return found[which % len(found)] if found else None

        @rule(draw=DRAW)
        def ask(self, draw: random.Random) -> None:
            if sum(not request.is_over for request in self.there.requests) < 6:
                self.there.ask(draw.choice(CASES), draw.choice((b"", b"", b"other")))

        @rule(draw=DRAW)
        def something_happens_to_a_request(self, draw: random.Random) -> None:
            if sum(not request.is_over for request in self.there.requests) < 6:
                happen(self.there, draw, draw.choice(PHASES), draw.choice(EVENTS))

        @rule(draw=DRAW)
        def something_happens_elsewhere(self, draw: random.Random) -> None:
            befall(self.there, draw, draw.choice(BACKGROUND), draw.choice(ROLES))

        @rule(role=st.sampled_from(ROLES), num=st.integers(0, 3), cut=st.booleans())
        def lose_answers(self, role: Role, num: int, cut: bool) -> None:
            self.there.attachments[role].line.lose(num, cut)

        @rule(times=st.integers(1, 4))
        def step_prefill(self, times: int) -> None:
            for _ in range(times):
                self.there.prefill.step()

        @rule(times=st.integers(1, 4))
        def step_decode(self, times: int) -> None:
            for _ in range(times):
                self.there.decode.step()

        @rule(which=NUMBER)
        def deliver(self, which: int) -> None:
            if (request := self.pick(which, lambda r: r.arrived is not None)) is not None:
                self.there.deliver(request)

        @rule(which=NUMBER)
        def cancel(self, which: int) -> None:
            if (request := self.pick(which, lambda r: True)) is not None:
                self.there.cancel(request)

        @rule(times=st.integers(1, 6))
        def go_on(self, times: int) -> None:
            for _ in range(times):
                self.there.pump()

        @invariant()
        def holds(self) -> None:
            if self.world is not None:
                self.world.check()

        def teardown(self) -> None:
            if self.world is None:
                return
            try:
                finish(self.world, expected, seen)
            finally:
                self.world.close()
                shutil.rmtree(self.directory)

    return Machine


@pytest.mark.parametrize("shard", range(SHARDS))
def test_no_order_of_events_costs_a_block_or_a_token(
    runner: ModelRunner, redis_client: Any, expected: dict[str, Answer], shard: int
) -> None:
    seen: Counter[str] = Counter()
    explore(make_machine(runner, redis_client, expected, seen), seen, FLOORS, shard, examples=30, steps=25)
