"""Speculation changes no token and no bit of a log-probability, whatever the drafts are.

The answers are compared with those of the same workers without drafts: greedy, sampled, with penalties, n = 4, beams;
with full attention, and with windows and keys of 8 bits. Drafts come from drafters, and from draft models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from engine.draft_model import load_draft_model
from engine.model_runner import ModelRunner, RunnerSettings
from engine.step import StepInput
from engine.tiny import make_checkpoint
from testing.equality.cases import Answer, Case, differences, expect, make_cases
from testing.equality.drafters import KINDS, Drafter, Kind, SpeculatingWorkers, drafter_of
from testing.equality.workers import Workers
from testing.oracle import Oracle
from testing.ranks import ThreadRanks

DraftKind = Literal["own", "unrelated"]
TIGHT = 26
"""Blocks for each KV group, fewer than the requests need together."""


@dataclass
class Subject:
    """A model, its expected answers, and those of workers without drafts."""

    runner: ModelRunner
    """The runner whose answers are expected."""
    ranks: ThreadRanks | None
    """The ranks of the workers with drafts; None: they use `runner`."""
    cases: list[Case]
    expected: list[Answer]
    plain: list[Answer]
    unrelated: Path
    """The directory of a model of the same vocabulary with other random weights."""

    def draft_runner(self, kind: DraftKind) -> ModelRunner:
        """Returns a new runner of a draft model."""
        return load_draft_model(str(self.runner.settings.model if kind == "own" else self.unrelated), self.drafting)

    @property
    def drafting(self) -> ModelRunner:
        """The runner of the workers with drafts."""
        return self.runner if self.ranks is None else self.ranks.runner

    def check(self, workers: Workers, **how: Any) -> None:
        found = [asked.answer for asked in workers.answer(self.cases, **how)]
        assert not (wrong := differences(self.cases, self.expected, found)), "\n".join(wrong)
        assert found == self.plain, "the same bits"
        workers.assert_idle()


@pytest.fixture(scope="module", params=["llama", "gemma2", "ranks"])
def subject(
    request: pytest.FixtureRequest, redis_client: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    """gemma2 has windows, and keys and values of 8 bits. Four ranks share the model `ranks`, in two stages."""
    directory = tmp_path_factory.mktemp(request.param)
    family: Any = "gemma2" if request.param == "gemma2" else "llama"
    heads: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4} if request.param == "ranks" else {}
    model = make_checkpoint(directory / "model", family, seed=3, dtype=torch.bfloat16, **heads)
    settings = RunnerSettings(
        model, num_threads=1, max_model_len=256, device="cpu", block_size=16, reduction_parts=2 if heads else None,
        kv_cache_dtype="int8" if family == "gemma2" else "auto",
    )  # fmt: skip
    runner = ModelRunner(settings)
    unrelated = make_checkpoint(directory / "unrelated", "llama", seed=9, num_hidden_layers=1)
    cases, oracle = make_cases(runner.config.vocab_size), Oracle(runner)
    workers = Workers(runner, directory / "arena", redis_client)
    plain = [asked.answer for asked in workers.answer(cases)]
    workers.close()
    expected = [expect(oracle, case) for case in cases]
    with ThreadRanks(settings, 2, stages=2) if heads else nullcontext() as ranks:
        yield Subject(runner, ranks, cases, expected, plain, unrelated)


Make = Callable[..., SpeculatingWorkers]


@pytest.fixture
def make_workers(subject: Subject, redis_client: Any, tmp_path: Path) -> Iterator[Make]:
    made: list[SpeculatingWorkers] = []

    def make(kind: Kind | DraftKind, **settings: Any) -> SpeculatingWorkers:
        drafter: Drafter | ModelRunner
        if kind == "own" or kind == "unrelated":
            drafter = subject.draft_runner(kind)
        else:
            drafter = drafter_of(kind, subject.cases, subject.expected, subject.runner.config.vocab_size)
        where = (subject.drafting, tmp_path / str(len(made)), redis_client)
        made.append(SpeculatingWorkers(drafter, *where, **settings))
        if subject.ranks is not None:
            subject.ranks.bind(made[-1].arena.data)
        return made[-1]

    yield make
    for workers in made:
        workers.close()


@pytest.mark.parametrize("kind", KINDS)
def test_no_draft_changes_a_token_or_a_bit(subject: Subject, make_workers: Make, kind: Kind) -> None:
    workers = make_workers(kind)
    subject.check(workers)
    workers.check_accepted(kind)
    assert not workers.rejections


@pytest.mark.parametrize("kind", ["lying", "own"])
@pytest.mark.parametrize("preemption", ["swap", "give-back"])
def test_preempted_between_drafts(
    subject: Subject, make_workers: Make, preemption: str, kind: Kind | DraftKind
) -> None:
    workers = make_workers(kind, num_blocks=TIGHT * len(subject.runner.layout.groups), preemption=preemption)
    subject.check(workers)
    counts = workers.preemption.counts
    assert counts.swapped_groups if preemption == "swap" else counts.given_back_groups
    assert workers.speculation.counts.num_drafts


@pytest.mark.parametrize("kind", ["own", "unrelated"])
def test_no_draft_model_changes_a_token_or_a_bit(subject: Subject, make_workers: Make, kind: DraftKind) -> None:
    """The target as its own draft model predicts what is drawn: greedy, sampled, and with penalties."""
    workers = make_workers(kind)
    subject.check(workers)
    counts = workers.speculation.counts
    accepted = sum(counts.accepted_by_position)
    assert counts.num_draft_tokens > 100
    if kind == "unrelated":
        assert accepted < counts.num_draft_tokens // 10
    elif subject.ranks is None:
        assert accepted > 0.9 * counts.num_draft_tokens, "what is missing is after the ends of samples"
    else:  # the draft model runs alone, and sums in another order than the ranks: on AMX, 2 of 52 drafts begin wrongly
        assert accepted > 0.8 * counts.num_draft_tokens


class Killed(BaseException):
    """The end of a worker's process."""


@pytest.mark.parametrize("kind", [*KINDS, "own"])
def test_decode_killed_while_it_verifies(
    subject: Subject, make_workers: Make, kind: Kind | DraftKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step has written the keys and values of drafts, and nothing of it has been published."""
    workers, step, verified = make_workers(kind), subject.drafting.step, []

    def die(batch: StepInput, *args: Any) -> torch.Tensor:
        logits = step(batch, *args)
        if num_drafted := len(batch.token_ids) - len(batch.context_lens):
            verified.append(num_drafted)
            raise Killed
        return logits

    def kill(them: Workers) -> None:
        if them.num_steps >= 3 * (1 + len(verified)) and len(verified) < 2:
            with monkeypatch.context() as patch:
                patch.setattr(subject.drafting, "step", die)
                try:
                    them.decode.step()
                except Killed:
                    them.kill_decode()

    subject.check(workers, before_step=kill)
    assert len(verified) == 2
    assert workers.num_returned > 0


def test_an_accepted_token_that_was_not_drawn_shows(
    subject: Subject, make_workers: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shows that the tests above can fail: one that counts a rejected position as computed gives other answers."""
    workers = make_workers("lying")
    take = type(workers.decode._progress)._take

    def too_many(self: Any, group: Any, sequence: Any, drawn: Any, draft: Any) -> Any:
        taken = take(self, group, sequence, drawn, draft)
        if len(taken.samples) <= len(draft) and taken.reason is None and sequence.num_computed % 16:
            sequence.output_ids.append(draft[len(taken.samples) - 1])
            sequence.num_computed += 1
            taken.samples.append(drawn[len(taken.samples)])
        return taken

    monkeypatch.setattr(type(workers.decode._progress), "_take", too_many)
    with pytest.raises(AssertionError):
        subject.check(workers)
