"""A draft model: what it predicts, what it has not seen, and whose state it drops."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.types import SamplingParams, StoppingParams
from engine.draft_model import RECENT, DraftModel, load_draft_model, num_draft_blocks
from engine.errors import ModelError
from engine.model_runner import ModelRunner, RunnerSettings
from engine.sequence import Sequence
from engine.tiny import make_checkpoint
from testing.oracle import Oracle
from testing.zoo import ZOO, make_foreign

PROMPT = [5 + 7 * i % 500 for i in range(45)]
STOPPING = StoppingParams(max_tokens=32)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, seed=7, repetition_penalty=1.2, logprobs=2, prompt_logprobs=1)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    """gemma2 has several KV groups, so the draft model has several tables for each sequence."""
    model = make_checkpoint(tmp_path_factory.mktemp("target"), "gemma2", seed=2)
    return ModelRunner(RunnerSettings(model, num_threads=1, max_model_len=128, device="cpu"))


@pytest.fixture(scope="module")
def runner(target: ModelRunner) -> ModelRunner:
    return load_draft_model(str(target.settings.model), target)


def new_model(runner: ModelRunner, num_sequences: int) -> DraftModel:
    return DraftModel(runner, num_draft_blocks(runner, num_sequences, 1 << 30))


def sequence(prompt: list[int]) -> Sequence:
    return Sequence(prompt, [9], SamplingParams(temperature=0.0), STOPPING)


def predict(model: DraftModel, sequence: Sequence, num_tokens: int) -> list[int]:
    """Predicts tokens in one round. The draft model must have seen the sequence but for a few tokens."""
    found = model.step([(sequence, model.num_unseen(sequence))])
    for _ in range(num_tokens - 1):
        found += model.step([(sequence, 1)])
    return [token for token in found if token is not None]


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), SAMPLED], ids=["greedy", "sampled"])
def test_it_draws_what_the_target_draws(target: ModelRunner, runner: ModelRunner, sampling: SamplingParams) -> None:
    """It catches up in chunks, and forgets what it has drawn after a wrong token."""
    model, real = new_model(runner, 2), Sequence(list(PROMPT), [], sampling, STOPPING)
    said = Oracle(target).generate(PROMPT, sampling, StoppingParams(max_tokens=20))
    real.output_ids += said[:3]
    model.begin_round([real])
    assert model.num_unseen(real) == 48
    assert model.step([(real, 16)]) == [None] and model.num_unseen(real) == 32
    assert model.step([(real, 16)]) == [None]
    assert predict(model, real, 5) == said[3:8]
    model.begin_round([real])
    real.output_ids += said[3:6]
    assert model.num_unseen(real) == 1, "the first two drawn tokens are computed, the third is not"
    assert predict(model, real, 4) == said[6:10]
    model.begin_round([real])
    real.output_ids += [said[6], said[7] ^ 1]
    assert model.num_unseen(real) == 1
    found = predict(model, real, 3)
    model.begin_round([])
    assert model.num_unseen(real) == len(PROMPT) + 8
    assert predict(model, real, 3) == found, "as if it had never drawn another token"


def test_another_sample_takes_over_the_prompt(runner: ModelRunner) -> None:
    model, one, other = new_model(runner, 2), sequence(list(PROMPT)), sequence(list(PROMPT))
    model.begin_round([one, other])
    expected = predict(model, one, 3)
    assert model.num_rows == 1
    [token] = model.step([(other, model.num_unseen(other))])
    assert model.num_rows == 1, "only the first output is not a part of the prompt"
    assert [token, *model.step([(other, 1)]), *model.step([(other, 1)])] == expected


def test_states_are_dropped_with_their_sequences_and_the_least_recently_used_is_evicted(runner: ModelRunner) -> None:
    """The cache has room for two sequences of full length: those of 119 to 121 tokens."""
    model = new_model(runner, 2)
    num_free = model.num_free
    first, second, third = (sequence([start] * 118) for start in (5, 6, 7))
    everyone = [first, second, third]
    model.begin_round(everyone)
    assert len(predict(model, first, 2)) == 2 and len(predict(model, second, 2)) == 2
    assert not predict(model, third, 1), "both others have just been used"
    for _ in range(RECENT):
        model.begin_round(everyone)
        predict(model, second, 1)
    assert len(predict(model, third, 1)) == 1
    assert model.num_unseen(first) == first.num_tokens and model.num_unseen(second) == 1
    model.begin_round([third])
    assert model.num_unseen(second) == second.num_tokens
    model.begin_round([])
    assert model.num_free == num_free


def test_a_model_that_does_not_fit_is_refused_by_name(target: ModelRunner, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", "llama", vocab_size=640)
    with pytest.raises(ModelError, match=r"speculative_config\.model .*640 tokens, the target's 512"):
        load_draft_model(str(other), target)
    with pytest.raises(ModelError, match=r"speculative_config\.model .*does not exist"):
        load_draft_model(str(tmp_path / "nothing"), target)
    states = make_foreign(tmp_path / "states", ZOO["mamba2"], seed=1)
    with pytest.raises(ModelError, match=r"speculative_config\.model .*recurrent state"):
        load_draft_model(str(states), target)


def test_the_cache_is_bounded(runner: ModelRunner) -> None:
    groups, size = len(runner.layout.groups), runner.layout.block_bytes
    assert num_draft_blocks(runner, 3, 1 << 40) == 3 * runner.max_blocks * groups
    assert num_draft_blocks(runner, 3, 10 * size) == 10
    assert num_draft_blocks(runner, 3, 1) == groups
