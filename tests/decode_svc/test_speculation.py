"""Drafts: what the n-gram index predicts, how many tokens a step verifies, and what a step costs."""

from __future__ import annotations

import random

import pytest

from common.speculative_config import SpeculativeConfig
from common.types import KvKind, KvLayout, KvSpec, SamplingParams, StoppingParams
from decode_svc.draft_lengths import Option, best_lengths
from decode_svc.ngram import LOOK_AHEAD, NgramDrafter
from decode_svc.role import speculation_of
from decode_svc.scheduler import Group
from decode_svc.settings import DecodeSettings
from decode_svc.speculation import DraftLimits, Speculation
from decode_svc.step_times import KEPT, LEAST, MAX_AGE, StepTimes
from engine.sequence import Sequence


def sequence(prompt: list[int], output: list[int]) -> Sequence:
    return Sequence(prompt, output, SamplingParams(), StoppingParams())


def brute_force(tokens: list[int], longest: int, shortest: int) -> list[int]:
    """Returns the prediction by a search of the definition."""
    for size in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                found = tokens[end : end + LOOK_AHEAD]
                return (found * LOOK_AHEAD)[:LOOK_AHEAD]
    return []


def test_the_index_finds_what_a_search_finds_as_the_output_grows() -> None:
    rng = random.Random(1)
    drafter = NgramDrafter(4, 2)
    grown = sequence([rng.randrange(4) for _ in range(50)], [])
    hits = 0
    for _ in range(200):
        grown.output_ids += [rng.randrange(4) for _ in range(rng.choice((1, 1, 3)))]
        found = list(drafter.predict(grown))
        assert found == brute_force(grown.token_ids, 4, 2)
        hits += bool(found)
    assert hits > 150
    drafter.drop(grown)
    assert list(drafter.predict(grown)) == brute_force(grown.token_ids, 4, 2), "it may come back"


def test_a_long_prompt_is_indexed_over_several_steps() -> None:
    prompt = [*range(10_000), 5, 6, 7]
    drafter, long = NgramDrafter(3, 3), sequence(prompt, [])
    assert not drafter.predict(long) and not drafter.predict(long)
    assert list(drafter.predict(long)) == list(range(8, 8 + LOOK_AHEAD))


def test_rows_are_added_while_they_pay() -> None:
    """With a + b * rows and a certain prediction, every row pays; with a poor one, or dear rows, none does."""

    def cheap(rows: int) -> float:
        return 10.0 + 0.1 * rows

    def dear(rows: int) -> float:
        return float(rows)

    assert best_lengths([Option(0, 0.95, 7)], 1, 64, cheap) == [7]
    assert best_lengths([Option(0, 0.95, 3)], 1, 64, cheap) == [3]
    assert best_lengths([Option(0, 0.95, 7)], 1, 64, dear) == [0]
    assert best_lengths([Option(0, 0.03, 7)], 1, 64, cheap) == [0]
    assert best_lengths([Option(0, 0.95, 7)], 1, 64, lambda rows: 0.0) == [0], "nothing has been measured"


def test_a_step_has_at_most_its_rows_and_the_best_predictions_get_them() -> None:
    options = [Option(1, 0.3, 5), Option(3, 0.9, 5)]
    lens = best_lengths(options, 4, 7, lambda rows: 10.0 + 0.01 * rows)
    assert lens == [0, 0, 0, 3]
    assert best_lengths(options, 4, 4, lambda rows: 10.0) == [0, 0, 0, 0]
    assert best_lengths(options, 4, 64, lambda rows: 10.0) == [0, 2, 0, 5], "gains below the least are not considered"


def test_a_time_is_a_median_of_the_latest_and_unknown_ones_lie_between() -> None:
    times = StepTimes()
    assert times.at(1) == 0.0
    for seconds in (1.0, 9.0, 1.0):
        times.note(1, seconds)
    assert times.at(1) == 1.0, "one disturbed step does not count"
    assert times.at(3) == pytest.approx(2.0), "half of a row's share for each further row"
    for _ in range(LEAST - 1):
        times.note(5, 3.0)
    assert times.at(5) == pytest.approx(3.0) and times.at(3) == pytest.approx(2.0)
    times.note(5, 2.0)
    times.note(5, 2.0)
    times.note(5, 2.0)
    assert times.at(5) == 2.0 or times.at(5) == 3.0
    assert 1.0 < times.at(3) < times.at(5)
    for _ in range(KEPT):
        times.note(5, 4.0)
    assert times.at(5) == 4.0


def test_old_times_are_forgotten() -> None:
    times = StepTimes()
    for _ in range(LEAST):
        times.note(8, 100.0)
    for _ in range(2 * MAX_AGE):
        times.note(1, 1.0)
    assert times.at(8) == pytest.approx(4.5)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "JSON"),
        ('{"method": "eagle", "num_speculative_tokens": 3}', "method"),
        ('{"method": "ngram"}', "num_speculative_tokens"),
        ('{"method": "ngram", "num_speculative_tokens": 33}', "num_speculative_tokens"),
        ('{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 0}', "prompt_lookup_max"),
        ('{"method": "ngram", "num_speculative_tokens": 3, "model": "x"}', "model"),
        (
            '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 3}',
            "prompt_lookup_min",
        ),
    ],
)
def test_a_bad_config_names_the_field(text: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SpeculativeConfig.parse(text)


def test_the_lengths_of_n_grams_have_vllms_defaults() -> None:
    def lengths(**more: int) -> tuple[int, int]:
        config = SpeculativeConfig(method="ngram", num_speculative_tokens=3, **more)  # type: ignore[arg-type]
        return config.shortest, config.longest

    assert lengths() == (5, 5) and lengths(prompt_lookup_max=4) == (4, 4) == lengths(prompt_lookup_min=4)
    assert lengths(prompt_lookup_min=2, prompt_lookup_max=4) == (2, 4)


def test_a_model_with_recurrent_states_runs_without_drafts() -> None:
    """A state cannot go back to the position before a rejected token."""
    config = '{"method": "ngram", "num_speculative_tokens": 3}'
    settings = DecodeSettings(model="any", speculative_config=config)
    attention = KvSpec(2, 2, 16, "bfloat16")
    states = KvSpec(2, 0, 0, "bfloat16", KvKind.STATE, state_bytes=64)
    assert speculation_of(KvLayout(16, (attention,)), 256, settings) is not None
    assert speculation_of(KvLayout(16, (attention, states)), 256, settings) is None
    assert speculation_of(KvLayout(16, (attention,)), 256, DecodeSettings(model="any")) is None


class Counting:
    """A drafter that predicts the same tokens every time, and counts the questions."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.num_asked = tokens, 0

    def predict(self, sequence: Sequence) -> list[int]:
        self.num_asked += 1
        return self.tokens

    def drop(self, sequence: Sequence) -> None:
        pass


def test_a_drafter_is_asked_rarely_until_it_is_right() -> None:
    drafter, grown = Counting([]), sequence([1], [1])
    speculation = Speculation(drafter, DraftLimits(3, 64, block_size=16, max_model_len=1024, max_pause=16))

    def asked(num_tokens: int) -> int:
        before = drafter.num_asked
        for _ in range(num_tokens):
            speculation.drafts([(Group(0, 1, [grown]), grown)])
            grown.output_ids.append(1)
        return drafter.num_asked - before

    assert asked(160) < 160 / 16 + 5
    drafter.tokens = [2, 2]
    assert asked(160) <= 160 / 16, "wrong predictions are no better than none"
    drafter.tokens = [1, 1]
    asked(40)
    assert asked(40) == 20, "a right prediction is followed by the next"
