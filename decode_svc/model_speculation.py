"""Decides for which sequences a draft model predicts how many tokens, and lets it predict them (docs/speculation.md).

Unlike n-grams, a draft model takes time. The lengths of drafts are therefore chosen before anything is predicted, from
the measured times of both models and the sequences' rates of right predictions. A sequence has no draft until the draft
model has caught up with it, in chunks between the steps of the target.

While no draft pays, a share of the time is saved up for *probes*, which are drafts that are verified only to find out
whether predictions have become better. The time that drafts have really saved, less the time of all passes of the draft
model, is added to these savings. Catching up may overdraw them only so far: if it is not followed by drafts that pay,
it ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq

from common.telemetry import Fallbacks
from decode_svc.draft_lengths import Choose, Option, best_lengths, saved_share
from decode_svc.draft_policy import FIRST_RATE, RATE_WEIGHT, DraftLimits, DraftPolicy
from decode_svc.running_blocks import Plan
from decode_svc.sampling_step import Taken
from decode_svc.step_times import StepTimes
from engine.draft import NO_DRAFT, Draft
from engine.draft_model import DraftModel
from engine.sequence import Sequence

logger = logging.getLogger("decode")
CHUNKS = (256, 128, 64, 32, 16)
"""Numbers of tokens that the draft model may catch up on, over all sequences, before one step of the target."""
CHUNK_SHARE = 0.5
"""A chunk may take this part of the time of the target's step. The smallest chunk is always allowed."""
READY = CHUNKS[-1]
"""If the draft model has not seen at most this many tokens of a sequence, its first pass for a draft includes them."""
PROBE_SHARE = 0.01
"""Part of the time that is spent on probes while no draft pays."""
PROBE_TOKENS = 3
MAX_DEBT = 32
"""The draft model may catch up until the savings are overdrawn by the time of this many steps without drafts. They are
also not increased beyond this time.
"""
TRIALS = 8
"""The worker's first TRIALS drafts are made whether they pay or not, because nothing has been measured."""
MAX_PAUSE = 16
"""Maximum number of steps for which nothing is considered. Each time that no draft pays and there is no time for a
probe, the pause roughly doubles. Otherwise, considering drafts would take a part of every step.
"""
_LEAST_WEIGHT = 0.02
"""Weight of the newest token in the mean rate of all sequences. The first tokens have a higher weight."""


class ModelSpeculation(DraftPolicy):
    """Chooses the drafts of one worker's steps, and predicts them with a draft model."""

    def __init__(self, model: DraftModel, limits: DraftLimits, choose: Choose = best_lengths) -> None:
        super().__init__(limits)
        self._model = model
        self._choose = choose
        self._passes = StepTimes()
        """Times of the draft model's passes."""
        self._rates: dict[Sequence, float] = {}
        self._mean_rate, self._num_compared = FIRST_RATE, 0
        self._asked: dict[Sequence, int] = {}
        """Number of tokens that were predicted for each sequence of this step."""
        self._saved_s = 0.0
        """Time that a probe may take; negative if the savings are overdrawn."""
        self._passes_s = 0.0
        """Time of the passes before this step."""
        self._is_catching_up = False
        """Whether a probe has begun, which must catch up before it predicts tokens."""
        self._fallbacks = Fallbacks(logger)
        self._has_failed = False
        self._pause = self._num_skipped = 0

    def drafts(self, plan: Plan) -> list[Draft]:
        """Returns one draft per sequence of the plan, or an empty list if there are no tokens to verify. If the draft
        model fails, there are no further drafts. Raises the failure if the device is no longer usable.
        """
        self._num_steps += 1
        self._asked, self._passes_s = {}, 0.0
        if self._has_failed or self._num_skipped < self._pause:
            self._num_skipped += 1
            return []
        try:
            found = self._predict(plan)
        except Exception as error:
            self._model.settle(error)
            logger.exception("the draft model failed")
            self._fallbacks.note("no draft", "the draft model failed; this worker goes on without it")
            self._has_failed, found = True, {}
        if not found:
            return []
        return [Draft.of(s, tuple(found[place])) if place in found else NO_DRAFT for place, (_, s) in enumerate(plan)]

    def note(self, taken: Seq[Taken], num_rows: int, seconds: float) -> None:
        super().note(taken, num_rows, seconds)
        self._saved_s += PROBE_SHARE * seconds - self._passes_s
        if self._asked:
            plain_s = self._times.at(len(taken))
            num_more = sum(item.num_accepted for item in taken)
            self._saved_s += plain_s * num_more / len(taken) - max(0.0, seconds - plain_s)
            self._saved_s = min(self._saved_s, MAX_DEBT * plain_s)
            for item in taken:
                for is_right in _outcomes(item, self._asked.get(item.sequence, 0)):
                    self._learn(item.sequence, is_right)

    # --- inside

    def _expecting(self, plan: Plan) -> Seq[Sequence]:
        return [sequence for _, sequence in plan if sequence in self._asked]

    def _predict(self, plan: Plan) -> dict[int, list[int]]:
        """Returns the predictions by place in the plan, and lets the draft model catch up."""
        sequences = {sequence: place for place, (group, sequence) in enumerate(plan) if group.search is None}
        self._model.begin_round(sequences.keys())
        self._rates = {s: rate for s, rate in self._rates.items() if s in sequences}
        num, time_of = len(plan), self._times.at
        max_rows, plain_s = self._limits.max_rows, time_of(num)
        if max_rows <= num or plain_s == 0.0:
            return {}
        options = [option for s, place in sequences.items() if (option := self._option(s, place)).room]
        if not options:
            return {}
        ready = [option for option in options if option.unseen <= READY]
        lens = self._choose(ready, num, max_rows, time_of, self._passes.at)
        late: list[tuple[Sequence, int]] = []
        may_owe = self._limits.catch_up_share is None or self._saved_s > -MAX_DEBT * plain_s
        if len(ready) < len(options) and may_owe:
            caught_up = [option._replace(unseen=1) for option in options]
            wanted = self._choose(caught_up, num, max_rows, time_of, self._passes.at)
            chosen = [option for option in options if option.unseen > READY and wanted[option.place]]
            saved_s = plain_s / num * saved_share(caught_up, wanted, time_of, self._passes.at)
            late = list(self._chunks(plan, chosen, plain_s, saved_s))
        if any(lens) or late:
            self._pause = 0
            return self._run(plan, lens, {option.place: option.unseen for option in ready}, late)
        return self._probe(plan, options)

    def _option(self, sequence: Sequence, place: int) -> Option:
        room = min(self._room(sequence), self._model.max_model_len - sequence.num_tokens)
        unseen = self._model.num_unseen(sequence)
        return Option(place, self._rates.get(sequence, self._mean_rate), max(0, room), unseen)

    def _chunks(self, plan: Plan, late: Seq[Option], plain_s: float, saved_s: float) -> Iterator[tuple[Sequence, int]]:
        """Yields the chunks with which the draft model catches up before this step, in the order of the plan, for the
        sequences for which that is expected to pay. `saved_s` is the time that drafts are expected to save per token.
        """
        left, share = self._chunk(plain_s), self._limits.catch_up_share
        row_s = self._passes.at(left) / left
        for option in late:
            sequence = plan[option.place][1]
            rest_s = saved_s * (sequence.stopping.max_tokens - len(sequence.output_ids))
            if left and (share is None or option.unseen * row_s <= share * rest_s):
                num_tokens = min(left, option.unseen)
                left -= num_tokens
                yield sequence, num_tokens

    def _chunk(self, plain_s: float) -> int:
        """Returns the number of tokens on which the draft model may catch up before this step."""
        if self._limits.catch_up_share is None:
            return CHUNKS[0]
        return next((n for n in CHUNKS if 0.0 < self._passes.at(n) <= CHUNK_SHARE * plain_s), CHUNKS[-1])

    def _run(
        self, plan: Plan, lens: Seq[int], unseen: dict[int, int], late: Seq[tuple[Sequence, int]]
    ) -> dict[int, list[int]]:
        """Runs the draft model's passes. `lens` are the lengths of the drafts, and `unseen` the numbers of rows of the
        sequences in the first pass. `late` are chunks of sequences that have no drafts yet.
        """
        found = {place: list[int]() for place, length in enumerate(lens) if length}
        for depth in range(max(1, *lens)):
            places = [place for place, tokens in found.items() if len(tokens) == depth < lens[place]]
            parts = [(plan[place][1], 1 if depth else unseen[place]) for place in places]
            parts += () if depth else late
            if not parts:
                break
            began = time.perf_counter()
            drawn = self._model.step(parts)
            pass_s = time.perf_counter() - began
            self._passes_s += pass_s
            if self._model.num_rows:
                self._passes.note(self._model.num_rows, pass_s)
            for place, token in zip(places, drawn, strict=False):
                if token is not None:
                    found[place].append(token)
        self._asked = {plan[place][1]: len(tokens) for place, tokens in found.items()}
        return {place: tokens for place, tokens in found.items() if tokens}

    def _probe(self, plan: Plan, options: Seq[Option]) -> dict[int, list[int]]:
        """Predicts a few tokens for the sequence of which the draft model has seen most, if enough time has been saved
        up. If there are too many tokens that it has not seen, it catches up in this step and the following ones first.
        """
        option, num, time_of = min(options, key=lambda each: each.unseen), len(plan), self._times.at
        length, chunk = min(PROBE_TOKENS, option.room, self._limits.max_rows - num), self._chunk(time_of(num))
        verified_s = max(0.0, time_of(num + length) - time_of(num))
        cost_s = option.unseen * self._passes.at(chunk) / chunk + length * self._passes.at(1) + verified_s
        if not self._is_catching_up and self._saved_s < cost_s and self.counts.num_drafts >= TRIALS:
            self._pause, self._num_skipped = min(MAX_PAUSE, 2 * self._pause + 1), 0
            return {}
        lens = [0] * num
        self._is_catching_up = option.unseen > READY
        if self._is_catching_up:
            return self._run(plan, lens, {}, [(plan[option.place][1], min(option.unseen, chunk))])
        self._saved_s = min(0.0, self._saved_s)
        lens[option.place] = length
        return self._run(plan, lens, {option.place: option.unseen}, ())

    def _learn(self, sequence: Sequence, is_right: bool) -> None:
        rate = self._rates.get(sequence, self._mean_rate)
        self._rates[sequence] = rate + RATE_WEIGHT * (is_right - rate)
        self._num_compared += 1
        self._mean_rate += max(_LEAST_WEIGHT, 1 / (self._num_compared + 1)) * (is_right - self._mean_rate)


def _outcomes(item: Taken, num_predicted: int) -> Iterator[bool]:
    """Yields whether each predicted token was right, up to the first wrong one. A token that the grammar did not allow
    is wrong. If the sample has ended, nothing is known of the tokens after its end.
    """
    yield from [True] * item.num_accepted
    if item.num_accepted < num_predicted and (item.reason is None or item.num_accepted < len(item.samples)):
        yield False
