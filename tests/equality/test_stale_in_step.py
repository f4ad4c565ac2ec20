"""The second check of the reader rule. Another process takes a block during `runner.step`. No result of that step may
be used: prefill seals nothing and hands nothing over, and decode sends no token. The requests still get the oracle's
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from block_store.arena.header import HeaderState
from common.types import KvLayout, SamplingParams, StoppingParams
from decode_svc import swap
from decode_svc.outputs import Rejection
from engine.model_runner import ModelRunner, RunnerSettings
from engine.step import StepInput
from engine.tiny import make_checkpoint
from testing.equality.cases import Answer, Case, differences, expect
from testing.equality.meddler import Meddler, When
from testing.equality.workers import Workers
from testing.ledger.block_thief import Thief
from testing.oracle import Oracle
from testing.zoo import ZOO, make_foreign

BLOCK_SIZE = 4
WHEN = pytest.mark.parametrize("when", get_args(When))
HEAD = tuple(range(20, 20 + 2 * BLOCK_SIZE))
Pick = Callable[[StepInput], int | None]
Make = Callable[..., "Scene"]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    model = make_checkpoint(tmp_path_factory.mktemp("model"), "llama", dtype=torch.bfloat16)
    settings = RunnerSettings(model, num_threads=1, max_model_len=128, device="cpu", block_size=BLOCK_SIZE)
    return ModelRunner(settings)


def case(name: str, *tail: int, num_sequences: int = 1, max_tokens: int = 14) -> Case:
    sampling = SamplingParams(temperature=1.0, seed=3, num_sequences=num_sequences, logprobs=2)
    return Case(name, (*HEAD, *tail), sampling, StoppingParams(max_tokens, max_tokens))


TWO = [case("one", 60, 61, 62), case("other", 70, 71, 72, 73, 74, 75)]


class Scene:
    """The workers, the expected answers, and the step in which a block is taken."""

    def __init__(self, workers: Workers, runner: ModelRunner, patch: pytest.MonkeyPatch) -> None:
        self.workers, self.runner, self.patch = workers, runner, patch
        self.thief, self._oracle = Thief(workers.arena), Oracle(runner)

    def expect(self, cases: list[Case]) -> list[Answer]:
        return [expect(self._oracle, case) for case in cases]

    def meddle(self, worker: Any, when: When, pick: Pick) -> tuple[Meddler, list[list[int]]]:
        """Takes a block in a later step of `worker`. Records how many tokens of each text have been sent before and
        after that step.
        """
        meddler, out = Meddler(self.runner, self.thief.take, when, pick), list[list[int]]()
        self.patch.setattr(self.runner, "step", meddler)
        step = worker.step

        def armed() -> float | None:
            was_taken, before = meddler.taken is not None, self._num_out()
            meddler.is_armed = True
            pause: float | None = step()
            meddler.is_armed = False
            if meddler.taken is not None and not was_taken:
                out.extend([before, self._num_out()])
                self._nothing_was_sealed(meddler)
            return pause

        self.patch.setattr(worker, "step", armed)
        return meddler, out

    def _num_out(self) -> list[int]:
        return [len(text.token_ids) for asked in self.workers._asked for text in asked.answer]

    def _nothing_was_sealed(self, meddler: Meddler) -> None:
        assert meddler.batch is not None
        written = {int(slot) // BLOCK_SIZE for slot in meddler.batch.slot_mappings[0]}
        states = {block: int(self.workers.arena.states[block]) for block in written - {meddler.taken}}
        assert HeaderState.SEALED not in states.values(), f"sealed in a step that read a stale block: {states}"

    def answer(self, cases: list[Case]) -> list[Answer]:
        return [asked.answer for asked in self.workers.answer(cases, before_step=lambda them: them.sweep())]

    def close(self) -> None:
        self.thief.close()
        self.workers.assert_idle()
        self.workers.close()


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    """A model with recurrent states, whose steps change blocks in place."""
    model = make_foreign(tmp_path_factory.mktemp("model"), ZOO["bamba"], dtype=torch.bfloat16)
    return ModelRunner(RunnerSettings(model, num_threads=1, max_model_len=128, device="cpu", block_size=BLOCK_SIZE))


@pytest.fixture
def make_scene(
    runner: ModelRunner, redis_client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Scene]]:
    made: list[Scene] = []

    def make(**settings: Any) -> Scene:
        made.append(Scene(Workers(runner, tmp_path, redis_client, **settings), runner, monkeypatch))
        return made[-1]

    yield make
    for scene in made:
        scene.close()


@WHEN
@pytest.mark.parametrize("fills", [False, True], ids=["", "fills a block"])
def test_a_block_taken_inside_a_step_of_decode(make_scene: Make, when: When, fills: bool) -> None:
    scene = make_scene()
    expected = scene.expect(TWO)

    def pick(batch: StepInput) -> int | None:
        fits = len(batch.context_lens) == 2 and (batch.context_lens[1] % BLOCK_SIZE == 0) == fills
        return int(batch.block_tables[0][1][2]) if fits else None  # after the blocks that both share

    _, out = scene.meddle(scene.workers.decode, when, pick)
    assert not differences(TWO, expected, scene.answer(TWO))
    assert out[0][1] == out[1][1], "no token of the step left"
    assert scene.workers.rejections == [(1, Rejection.LOST)] and scene.workers.num_returned == 1


@WHEN
def test_the_source_of_a_copy_taken_inside_a_step_of_decode(make_scene: Make, when: When) -> None:
    """When samples diverge, each except the last copies the prompt's partial block, which is then in none of the first
    two tables.
    """
    scene = make_scene()
    cases = [case("n=3", 60, 61, num_sequences=3)]
    expected, sources, copy = scene.expect(cases), list[int](), scene.runner.copy_blocks

    def noting(src_ids: list[int], dst_ids: list[int]) -> None:
        sources.extend(src_ids)
        copy(src_ids, dst_ids)

    scene.patch.setattr(scene.runner, "copy_blocks", noting)
    meddler, out = scene.meddle(scene.workers.decode, when, lambda _: sources[0] if sources else None)
    assert not differences(cases, expected, scene.answer(cases))
    assert meddler.taken == sources[0] and scene.workers.rejections == [(0, Rejection.LOST)]
    assert out[0] == out[1], "no token of the step left"


@WHEN
@pytest.mark.parametrize("budget", [6, 512], ids=["in chunks", "whole"])
def test_a_cached_block_taken_inside_a_step_of_prefill(make_scene: Make, when: When, budget: int) -> None:
    scene = make_scene(budget=budget)
    expected = scene.expect(TWO)
    assert not differences(TWO[:1], expected[:1], scene.answer(TWO[:1]))
    meddler, out = scene.meddle(scene.workers.prefill, when, lambda batch: int(batch.block_tables[0][0][0]))
    assert not differences(TWO, expected, scene.answer(TWO))
    assert meddler.taken is not None and scene.workers.num_returned >= 1
    assert out[0] == out[1] and scene.workers.rejections == [], "noticed by prefill, nothing was handed over"


@WHEN
def test_a_block_taken_inside_the_step_of_prefill_that_writes_it(make_scene: Make, when: When) -> None:
    scene = make_scene()
    expected = scene.expect(TWO)
    pick: Pick = lambda batch: int(batch.slot_mappings[0][-1]) // BLOCK_SIZE  # noqa: E731
    meddler, out = scene.meddle(scene.workers.prefill, when, pick)
    assert not differences(TWO, expected, scene.answer(TWO))
    assert meddler.taken is not None and scene.workers.num_returned >= 1
    assert out[0] == out[1] and scene.workers.rejections == []


@WHEN
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("is_repeated", [False, True], ids=["", "as if it could be repeated"])
def test_a_step_over_states_is_not_repeated(
    hybrid: ModelRunner, redis_client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    when: When, role: str, is_repeated: bool,
) -> None:  # fmt: skip
    """One of two groups in a step loses a block. The states of the other group have already advanced."""
    scene = Scene(Workers(hybrid, tmp_path, redis_client, budget=7), hybrid, monkeypatch)
    expected = scene.expect(TWO)
    if is_repeated:
        monkeypatch.setattr(KvLayout, "has_states", False)

    def pick(batch: StepInput) -> int | None:
        begins_within_a_block = (batch.context_lens[0] - batch.cu_seqlens_q[1]) % BLOCK_SIZE > 0
        has_copied = role == "prefill" or batch.context_lens[0] > 12  # a copy can be repeated from its source
        fits = len(batch.context_lens) == 2 and begins_within_a_block and has_copied
        return int(batch.slot_mappings[0][-1]) // BLOCK_SIZE if fits else None  # only in the second group

    meddler, _ = scene.meddle(getattr(scene.workers, role), when, pick)
    wrong = differences(TWO, expected, scene.answer(TWO))
    assert meddler.taken is not None and bool(wrong) == is_repeated
    scene.close()


@WHEN
def test_a_block_taken_while_a_group_is_swapped_out(make_scene: Make, when: When) -> None:
    scene = make_scene(num_blocks=26, preemption="swap")
    cases = [case(str(i), 60 + i, 61, max_tokens=40) for i in range(3)]
    expected, taken, copy = scene.expect(cases), list[int](), swap.copy_blocks

    def meddling(src: torch.Tensor, dst: torch.Tensor, src_ids: torch.Tensor, dst_ids: torch.Tensor) -> None:
        out = src.data_ptr() == scene.runner.bound_arena.data_ptr() and not taken
        if out:
            taken.append(int(src_ids[-1]))
        if out and when == "before it is read":
            scene.thief.take(taken[0])
        copy(src, dst, src_ids, dst_ids)
        if out and when == "after it is read":
            scene.thief.take(taken[0])

    scene.patch.setattr(swap, "copy_blocks", meddling)
    assert not differences(cases, expected, scene.answer(cases))
    assert taken and scene.workers.preemption.counts.lost_groups == 1
    assert Rejection.LOST in {rejection for _, rejection in scene.workers.rejections}
