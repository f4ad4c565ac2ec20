"""Drafts: what n-grams predict, how many tokens a step verifies, and what a step costs."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.speculative_config import SpeculativeConfig
from common.types import KvKind, KvLayout, KvSpec, SamplingParams, StoppingParams
from decode_svc.draft_lengths import Choose, Option, best_lengths, saved_share
from decode_svc.draft_policy import PLAIN_EVERY, DraftLimits
from decode_svc.model_speculation import MAX_DEBT, MAX_PAUSE, PROBE_TOKENS, READY, TRIALS, ModelSpeculation
from decode_svc.ngram import LEAST_AHEAD, LOOK_AHEAD, NgramDrafter
from decode_svc.role import speculation_of
from decode_svc.running_blocks import Plan
from decode_svc.sampling_step import Taken
from decode_svc.scheduler import Group
from decode_svc.settings import DecodeSettings
from decode_svc.speculation import Speculation
from decode_svc.step_times import KEPT, LEAST, MAX_AGE, StepTimes
from engine.draft import Draft
from engine.draft_model import DraftModel, load_draft_model, num_draft_blocks
from engine.model_runner import ModelRunner
from engine.sampler import Sampled
from engine.sequence import Sequence
from engine.tiny import make_checkpoint
from testing.decode import DecodeBench
from testing.oracle import Oracle


def sequence(prompt: list[int], output: list[int]) -> Sequence:
    return Sequence(prompt, output, SamplingParams(), StoppingParams())


def brute_force(tokens: list[int], longest: int, shortest: int) -> list[int]:
    """Returns the prediction by a search of the definition."""
    for size in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                found = tokens[end : end + LOOK_AHEAD]
                return found if len(found) >= LEAST_AHEAD else (found * LEAST_AHEAD)[:LEAST_AHEAD]
    return []


def test_a_prediction_is_what_a_search_finds_as_the_output_grows() -> None:
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
    assert drafter.predict(grown) == brute_force(grown.token_ids, 4, 2), "it may come back"


def test_the_longest_n_gram_is_found_however_long_ago_it_occurred() -> None:
    prompt = [1, 2, 3, 4, 7, 555, *[7, 100] * 50_000, 1, 2, 3, 4, 7]
    assert NgramDrafter(5, 1).predict(sequence(prompt, []))[0] == 555
    assert NgramDrafter(1, 1).predict(sequence(prompt, []))[0] == 100


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


def test_the_passes_of_a_draft_model_count() -> None:
    """Rows of the target are almost free. With a certain prediction, each pass of the draft model pays until it takes
    as long as a step of the target.
    """

    def target(rows: int) -> float:
        return 10.0 + 0.01 * rows

    def passes_of(seconds: float) -> Callable[[int], float]:
        return lambda rows: seconds

    one = [Option(0, 0.95, 7)]
    assert best_lengths(one, 1, 64, target, passes_of(0.5)) == [7]
    assert 0 < best_lengths([Option(0, 0.7, 7)], 1, 64, target, passes_of(3.0))[0] < 3
    assert best_lengths(one, 1, 64, target, passes_of(9.9)) == [0]
    assert best_lengths([Option(i, 0.6, 1) for i in range(8)], 8, 64, target, passes_of(4.0)) == [1] * 8
    assert best_lengths([Option(0, 0.6, 1)], 8, 64, target, passes_of(4.0)) == [0] * 8, "one is not worth a pass"
    many = [Option(0, 0.9, 1, unseen=400)]
    assert best_lengths(many, 1, 64, target, lambda rows: 0.1 * rows) == [0]


def test_the_share_of_time_that_drafts_save() -> None:
    def constant(rows: int) -> float:
        return 2.0

    options = [Option(0, 0.5, 4), Option(1, 1.0, 4)]
    assert saved_share(options, [0, 0], constant, constant) == 0.0
    assert saved_share(options, [0, 3], constant, lambda rows: 0.0) == pytest.approx(1 - 2 / 5)
    assert saved_share(options, [2, 3], constant, lambda rows: 0.0) == pytest.approx(1 - 2 / 5.75)
    assert saved_share(options, [1, 1], constant, lambda rows: 1.0 * rows) == 0.0, "two rows of one second"


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


def test_a_time_is_at_most_that_of_more_rows() -> None:
    """Otherwise a few disturbed steps of a rare size would keep longer drafts from being tried."""
    times = StepTimes()
    for num_rows, seconds in ((1, 1.0), (3, 9.0), (4, 2.0), (8, 3.0)):
        for _ in range(LEAST):
            times.note(num_rows, seconds)
    assert [times.at(n) for n in (1, 2, 3, 4, 6, 8)] == [1.0, 1.5, 2.0, 2.0, 2.5, 3.0]
    assert times.at(16) == pytest.approx(4.5)


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
        ('{"method": "ngram", "num_speculative_tokens": 3, "kv_space": 1}', "kv_space"),
        ('{"method": "draft_model", "num_speculative_tokens": 3}', "requires model"),
        ('{"method": "draft_model", "num_speculative_tokens": 3, "model": ""}', "model"),
        ('{"method": "draft_model", "num_speculative_tokens": 3, "model": "x", "kv_space": 0}', "kv_space"),
        (
            '{"method": "draft_model", "num_speculative_tokens": 3, "model": "x", "prompt_lookup_max": 3}',
            "prompt_lookup_max",
        ),
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


def no_rows(rates: list[float]) -> Choose:
    """Returns a choice of no drafts, which adds the rate of the first option to `rates`."""

    def choose(options: Seq[Option], num: int, *rest: Any) -> list[int]:
        rates.append(options[0].rate)
        return [0] * num

    return choose


def all_rows(options: Seq[Option], num: int, *rest: Any) -> list[int]:
    return [option.room for option in options] or [0] * num


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

    assert asked(160) == 6 + 160 / 16, "1, 1, 2, 2, 4, 8, and then 16 steps apart"
    drafter.tokens = [2, 2]
    assert asked(160) <= 160 / 16, "wrong predictions are no better than none"
    drafter.tokens = [1, 1]
    asked(40)
    assert asked(40) == 20, "a right prediction is followed by the next"


def test_a_prediction_goes_on_after_one_wrong_token_as_in_an_edited_text() -> None:
    drafter, grown = Counting(list(range(20, 40))), sequence([1], [1])

    speculation = Speculation(drafter, DraftLimits(3, 64, block_size=16, max_model_len=1024), all_rows)

    def drafted(*tokens: int) -> tuple[int, ...]:
        """Returns the draft of the next step, once the sequence has these further tokens."""
        grown.output_ids += tokens
        drafts = speculation.drafts([(Group(0, 1, [grown]), grown)])
        return drafts[0].token_ids if drafts else ()

    assert drafted() == (20, 21, 22)
    assert drafted(20, 21) == (22, 23, 24)
    assert drafted(5) == (23, 24, 25), "a name may have been replaced"
    assert drafted(23, 6) == (25, 26, 27), "the token between was right"
    assert drafter.num_asked == 1
    drafter.tokens = []
    assert drafted(7) == (), "two wrong tokens in a row"
    drafter.tokens = [30, 31, 32, 33]
    assert drafted(8) == (30, 31, 32) and drafter.num_asked == 2
    assert drafted(9) == (), "the first token of a prediction was wrong"
    drafter.tokens = [50, 51]
    assert (50, 51) in (drafted(token) for token in range(10, 20))
    drafted(50)
    drafter.tokens = [60, 61, 62]
    assert drafted(51) == (60, 61, 62), "the end of a prediction is followed by the next"
    assert drafted(5) == (), "the first token of a prediction was wrong, and the last one of the one before was right"


def test_the_first_predictions_count_more() -> None:
    """So that the rate soon is that of the text: 1/2, 2/3, 3/4."""
    rates = list[float]()

    grown = sequence([1], [1])
    speculation = Speculation(Counting([1] * 40), DraftLimits(3, 64, block_size=64, max_model_len=1024), no_rows(rates))
    for _ in range(30):
        speculation.drafts([(Group(0, 1, [grown]), grown)])
        grown.output_ids.append(1)
    assert rates[:3] == pytest.approx([1 / 2, 2 / 3, 3 / 4]) and rates[-1] > 0.95


def test_drafts_that_are_not_worth_a_row_are_considered_rarely() -> None:
    considered, num_steps, worth = list[int](), 0, False

    def choose(options: Seq[Option], num: int, *rest: Any) -> list[int]:
        considered.append(num_steps)
        return all_rows(options, num) if worth else [0] * num

    grown, other = (Sequence([1], [1], SamplingParams(), StoppingParams(max_tokens=1000)) for _ in "ab")
    speculation = Speculation(Counting([1] * 1000), DraftLimits(3, 64, block_size=16, max_model_len=4096), choose)
    plan = [(Group(0, 1, [grown]), grown)]
    while num_steps < 160:
        num_steps += 1
        assert speculation.drafts(plan) == []
        grown.output_ids.append(1)
    assert considered[:7] == [1, 2, 3, 5, 7, 10, 13] and considered[-3:] == [137, 145, 153]
    plan = [*plan, (Group(0, 2, [other]), other)]
    while num_steps < 164:
        num_steps += 1
        assert speculation.drafts(plan) == []
    assert considered[-4:] == [153, 161, 162, 163], "another sequence has come"
    worth = True
    assert all(speculation.drafts(plan) for _ in range(4))


def test_a_sequence_that_takes_the_place_of_another_is_looked_up_at_once() -> None:
    drafter = Counting([])
    speculation = Speculation(drafter, DraftLimits(3, 64, block_size=16, max_model_len=1024, max_pause=16))
    for number in range(1, 20):
        grown = sequence([1], [1])
        speculation.drafts([(Group(0, number, [grown]), grown)])
        assert drafter.num_asked == number
        speculation.drafts([(Group(0, number, [grown]), grown)])
        drafter.num_asked = number


def test_samples_are_looked_up_after_a_beam_search_of_as_many_sequences() -> None:
    drafter, beams, samples = Counting([]), [sequence([1], [1]) for _ in "ab"], [sequence([1], [1]) for _ in "ab"]
    speculation = Speculation(drafter, DraftLimits(3, 64, block_size=16, max_model_len=1024))
    search: Any = object()
    for _ in range(3):
        speculation.drafts([(Group(0, 1, beams, search=search), beam) for beam in beams])
    assert drafter.num_asked == 0
    speculation.drafts([(Group(0, 2, samples), sample) for sample in samples])
    assert drafter.num_asked == 2


def test_resting_sequences_end_their_pauses_in_the_same_step() -> None:
    drafter, grown = Counting([]), [sequence([1], [1]) for _ in range(8)]
    speculation = Speculation(drafter, DraftLimits(3, 64, block_size=16, max_model_len=1024, max_pause=16))
    asked = []
    for step in range(160):
        running = grown[: 1 + step // 4]  # they begin at different times
        before = drafter.num_asked
        assert speculation.drafts([(Group(0, 1, [each]), each) for each in running]) == []
        asked.append(drafter.num_asked - before)
        for each in running:
            each.output_ids.append(1)
    assert sorted(asked[-32:]) == [0] * 30 + [8, 8]


def test_a_sequence_begins_with_the_rate_of_earlier_ones() -> None:
    rates = list[float]()

    speculation = Speculation(Counting([1] * 40), DraftLimits(3, 64, block_size=64, max_model_len=1024), no_rows(rates))
    for token, expected in ((1, 0.5), (1, 0.57), (2, 0.63), (1, 0.55)):
        grown = sequence([1], [1])
        for step in range(60):
            speculation.drafts([(Group(0, 1, [grown]), grown)])
            if step == 0:
                assert rates[-1] == pytest.approx(expected, abs=0.01)
            grown.output_ids.append(token)


class Script:
    """Predicts a given output."""

    def __init__(self, output_ids: list[int]) -> None:
        self._output_ids = output_ids

    def predict(self, sequence: Sequence) -> list[int]:
        return self._output_ids[len(sequence.output_ids) :]

    def drop(self, sequence: Sequence) -> None:
        pass


class Noted(Speculation):
    """Counts the steps of which it is told."""

    num_noted = 0

    def note(self, taken: Seq[Taken], num_rows: int, seconds: float) -> None:
        self.num_noted += 1
        super().note(taken, num_rows, seconds)


class Always(Noted):
    """Wants to know of every step, like a policy with a draft model."""

    def drafts(self, plan: Plan) -> list[Draft]:
        drafts = super().drafts(plan)
        self.wants_step = True
        return drafts


@pytest.mark.parametrize("kind", [Noted, Always])
def test_a_worker_reports_the_steps_that_a_policy_wants(
    kind: type[Noted], small_runner: ModelRunner, redis_client: Any, tmp_path: Path
) -> None:
    """If nothing is predicted: the first steps, until their time is known, and then every sixteenth one."""
    policy = kind(Counting([]), DraftLimits(3, 64, block_size=4, max_model_len=256))
    bench = DecodeBench(small_runner, tmp_path, redis_client, num_blocks=64, speculation=policy)
    bench.submit(1, [5, 6, 7], SamplingParams(temperature=0.0), StoppingParams(max_tokens=81))
    num_steps = sum(bench.worker.step() is not None for _ in range(80)) + 1
    assert num_steps == 80
    assert policy.num_noted == (80 if kind is Always else LEAST + 80 // PLAIN_EVERY)
    bench.close()


def test_a_draft_goes_on_in_another_block_if_one_is_free(
    small_runner: ModelRunner, redis_client: Any, tmp_path: Path
) -> None:
    """Blocks have four tokens. With three tokens a step, every second draft needs two blocks."""
    output, num_steps = list[int](), list[int]()
    for name in ("plain", "ample", "scarce"):
        script = Speculation(Script(output), DraftLimits(2, 64, block_size=4, max_model_len=256), all_rows)
        speculation = None if name == "plain" else script
        bench = DecodeBench(small_runner, tmp_path / name, redis_client, num_blocks=64, speculation=speculation)
        group = bench.submit(1, [*range(5, 13)], SamplingParams(temperature=0.0), StoppingParams(max_tokens=25))
        others = bench.prefill.alloc(64 - bench.held.num_held if name == "scarce" else 1)
        num_steps.append(0)
        while (wait := bench.worker.step()) is not None:
            num_steps[-1] += wait == 0.0
            if wait:  # the sequence waits for a block
                bench.prefill.release([others.pop()])
            assert name == "ample" or len(group.sequences[0].table) <= group.sequences[0].num_computed // 4 + 1
        [ids] = bench.inbox.ids(1).values()
        output = output or ids
        assert ids == output and len(ids) == 25 and not bench.inbox.rejections
        bench.prefill.release(others)
        bench.close()
    plain, ample, scarce = num_steps
    assert plain == 23 and ample == 7 < scarce <= 12, "the last step is not counted"


class Modeled:
    """A sequence that a target continues greedily, and drafts of a draft model. Steps of the target take `seconds`."""

    def __init__(self, target: ModelRunner, model: str, prompt: list[int]) -> None:
        runner = load_draft_model(model, target)
        self.model = DraftModel(runner, num_draft_blocks(runner, 1, 1 << 30))
        self.policy = ModelSpeculation(self.model, DraftLimits(3, 64, block_size=16, max_model_len=256))
        self.sequence = sequence(prompt, [])
        self.sequence.sampling, self.sequence.stopping = SamplingParams(temperature=0.0), StoppingParams(max_tokens=200)
        self._said = Oracle(target).generate(prompt, self.sequence.sampling, replace(self.sequence.stopping))
        self.sequence.output_ids, self.sequence.num_computed = self._said[:1], len(prompt)
        self.num_passes = 0
        step = self.model.step

        def count(parts: list[tuple[Sequence, int]]) -> list[int | None]:
            self.num_passes += 1
            return step(parts)

        self.model.step = count  # type: ignore[method-assign, assignment]

    def run(self, num_steps: int, seconds: float) -> tuple[int, int]:
        """Returns how many drafts had tokens, and how many tokens were accepted."""
        before = self.policy.counts
        for _ in range(num_steps):
            drafts = self.policy.drafts([(Group(0, 1, [self.sequence]), self.sequence)])
            draft = drafts[0].token_ids if drafts else ()
            outputs, accepted = self.sequence.output_ids, 0
            while accepted < len(draft) and draft[accepted] == self._said[len(outputs) + accepted]:
                accepted += 1
            drawn = self._said[len(outputs) : len(outputs) + accepted + 1]
            outputs += drawn
            self.sequence.num_computed += len(drawn)
            samples = [Sampled(token, None) for token in drawn]
            taken = Taken(Group(0, 1, [self.sequence]), self.sequence, samples, None, len(draft), accepted)
            self.policy.note([taken], 1 + len(draft), seconds)
        now = self.policy.counts
        accepted = sum(now.accepted_by_position) - sum(before.accepted_by_position)
        return now.num_drafts - before.num_drafts, accepted


@pytest.fixture
def target(ordinary_runner: ModelRunner) -> ModelRunner:
    return ordinary_runner


PROMPT = [7 + 3 * i % 400 for i in range(40)]


def test_a_draft_model_drafts_where_that_pays(target: ModelRunner, model: Path) -> None:
    """Steps of the target take so long that any right prediction pays. The prompt is seen in chunks before."""
    modeled = Modeled(target, str(model), PROMPT)
    drafted, accepted = modeled.run(20, seconds=10.0)
    assert modeled.model.num_unseen(modeled.sequence) <= READY
    assert drafted >= TRIALS and accepted >= 2 * drafted


def test_a_draft_model_that_takes_too_long_rests(target: ModelRunner, model: Path) -> None:
    """No draft pays if steps of the target take no time. What it computes is paid from a share of the time."""
    modeled = Modeled(target, str(model), PROMPT[:READY])
    modeled.run(TRIALS + 20, seconds=1e-9)
    num_passes = modeled.num_passes
    assert num_passes > 0, "the times are measured"
    assert modeled.run(60, seconds=1e-9) == (0, 0) and modeled.num_passes == num_passes


def test_wrong_predictions_end_drafts_and_probes_begin_them_again(target: ModelRunner, tmp_path: Path) -> None:
    unrelated = make_checkpoint(tmp_path / "unrelated", "llama", seed=5, num_hidden_layers=1)
    modeled = Modeled(target, str(unrelated), PROMPT[:READY])
    modeled.run(60, seconds=10.0)
    drafted, accepted = modeled.run(60, seconds=10.0)
    assert accepted <= 3
    modeled.policy._saved_s = -1e9
    drafted, _ = modeled.run(20, seconds=1e-3)
    assert drafted == 0, "nothing is saved up for probes"
    num_passes = modeled.num_passes
    assert modeled.model.num_unseen(modeled.sequence) > READY
    modeled.policy._saved_s = 1e9
    drafted, _ = modeled.run(MAX_PAUSE + 6, seconds=1e-9)
    assert drafted == 1, "first it catches up, then it predicts"
    assert modeled.num_passes <= num_passes + 5 + PROBE_TOKENS, "a probe uses up what had been saved"


def test_catching_up_ends_if_it_is_not_followed_by_drafts_that_pay(target: ModelRunner, model: Path) -> None:
    """All seems to pay, but the draft model is not asked for drafts: what it computes overdraws the savings."""
    modeled = Modeled(target, str(model), PROMPT)

    def only_late(options: Seq[Option], num: int, *how: Any) -> list[int]:
        return [3 if options and all(option.unseen == 1 for option in options) else 0] * num

    modeled.policy._choose = only_late
    modeled.policy._limits = replace(modeled.policy._limits, catch_up_share=1e9)
    modeled.policy._saved_s = -0.5 * MAX_DEBT
    modeled.run(6, seconds=1.0)
    num_passes = modeled.num_passes
    assert num_passes > 0, "it catches up on credit"
    modeled.policy._saved_s = -1.5 * MAX_DEBT
    modeled.model.begin_round(())
    modeled.policy.counts = replace(modeled.policy.counts, num_drafts=TRIALS)
    modeled.run(6, seconds=1.0)
    assert modeled.num_passes == num_passes


def test_a_draft_model_that_fails_costs_no_step(
    target: ModelRunner, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    modeled = Modeled(target, str(model), PROMPT)

    def fail(parts: list[tuple[Sequence, int]]) -> list[int | None]:
        raise RuntimeError("the draft model is broken")

    modeled.run(12, seconds=10.0)
    modeled.model.step = fail  # type: ignore[method-assign, assignment]
    assert modeled.run(8, seconds=10.0) == (0, 0)
    assert modeled.model.num_unseen(modeled.sequence) == modeled.sequence.num_tokens
    assert caplog.text.count("goes on without it") == 1
