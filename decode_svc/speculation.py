"""Decides which drafts the next step verifies, if predictions take almost no time (docs/speculation.md).

A drafter predicts the tokens that follow each sequence. The tokens that are drawn later show how often the drafter is
right, even if no step verified its prediction. A row is used only if it is expected to increase the number of tokens
per second. This module allocates no blocks, and reads no clock. `decode_svc.model_speculation` is for draft models,
whose predictions take time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from decode_svc.draft_lengths import Choose, Option, best_lengths
from decode_svc.draft_policy import FIRST_RATE, PLAIN_EVERY, RATE_WEIGHT, DraftLimits, DraftPolicy
from decode_svc.running_blocks import Plan
from decode_svc.step_times import LEAST
from engine.draft import NO_DRAFT, Draft
from engine.sequence import Sequence

_LEAST_COMPARED = 8
"""Number of predicted tokens after which a sequence's rate counts for later sequences."""
_MOST_IDLE = 8
"""Maximum number of steps until drafts are considered again after no row of a step was worth its time. Considering them
costs about as much as a fiftieth of a small model's step.
"""


class Drafter(Protocol):
    """The interface of a predictor of the tokens that follow a sequence. Its predictions affect only the speed, not the
    tokens.
    """

    def predict(self, sequence: Sequence) -> Seq[int]:
        """Returns tokens that may follow the sequence, or no tokens."""

    def drop(self, sequence: Sequence) -> None:
        """Drops the data that is stored for a sequence. `predict` may be called for the sequence again."""


@dataclass(slots=True)
class _Guess:
    """The prediction for one sequence."""

    max_pause: int
    tokens: Seq[int] = ()
    at: int = 0
    """Number of leading tokens that the sequence has passed."""
    was_right: bool = False
    """Whether the last of them was right."""
    num_outputs: int = 0
    """Length of the sequence's output when the guess was last compared with it."""
    rate: float = FIRST_RATE
    """Estimated probability that the next token of a prediction is right: the share of right ones, with the first
    estimate as if from two, and later a mean of the latest ones.
    """
    num_compared: int = 0
    num_misses: int = 0
    """Number of wrong or missing predictions, less two for each token that was predicted correctly, at least 0."""
    ask_at: int = 0
    """Number of the step in which the drafter is called again."""

    @property
    def num_left(self) -> int:
        """Number of tokens that the sequence has not passed yet."""
        return len(self.tokens) - self.at

    def compare(self, output_ids: Seq[int], step: int) -> None:
        """Compares the guess with the new tokens. If one is wrong after a right one, as in an edited text, the guess
        goes on after it. Otherwise there is no guess any more.
        """
        for token in output_ids[self.num_outputs :] if self.tokens else ():
            if not self.num_left:
                break
            is_right = self.tokens[self.at] == token
            self.num_compared += 1
            self.rate += max(RATE_WEIGHT, 1 / (self.num_compared + 2)) * (is_right - self.rate)
            if is_right or self.was_right:
                self.at, self.was_right = self.at + 1, is_right
                self.num_misses = max(0, self.num_misses - 2 * is_right)
            else:
                self.tokens, self.at = (), 0
                self.rest(step)
        self.num_outputs = len(output_ids)

    def rest(self, step: int) -> None:
        """Postpones the next call of the drafter, after a wrong or missing prediction, to a step whose number is a
        multiple of 1, 1, 2, 2, 4, 8, 16, ..., so that sequences often end their pauses in the same step, and most steps
        call no drafter.
        """
        doublings = self.num_misses // 2 if self.num_misses < 4 else self.num_misses - 2
        pause = min(self.max_pause, 1 << min(doublings, 30))
        self.num_misses += 1
        self.ask_at = (step // pause + 1) * pause if pause else step


class Speculation(DraftPolicy):
    """Chooses the drafts of one worker's steps from the predictions of a drafter."""

    def __init__(self, drafter: Drafter, limits: DraftLimits, choose: Choose = best_lengths) -> None:
        super().__init__(limits)
        self._drafter = drafter
        self._choose = choose
        self._guesses: dict[Sequence, _Guess] = {}
        self._plan: Plan = []
        """The last plan."""
        self._idle_until: float = 0
        """Number of the step until which there are no drafts for these sequences. It is 0 while one of them has a
        prediction that may be worth a row.
        """
        self._timed_until = 0
        """Number of the step until which steps without drafts are timed, because their time is not known."""
        self._num_declined = 0
        """Number of times in a row that these sequences had predictions, and none was worth a row."""
        self._first_rate = FIRST_RATE
        """The first estimate of a sequence's rate: a mean of the last estimates of earlier sequences."""

    def drafts(self, plan: Plan) -> list[Draft]:
        self._num_steps += 1
        if plan != self._plan:  # compares by identity
            self._forget_others(plan)
            self._plan, self._idle_until, self._num_declined = plan, 0, 0
            self._timed_until = self._num_steps + LEAST * (not self._times.knows(len(plan)))
        self.wants_step = self._num_steps % PLAIN_EVERY == 0 or self._num_steps < self._timed_until
        if self._num_steps < self._idle_until:
            return []
        options, guesses = list[Option](), dict[int, _Guess]()
        self._idle_until = math.inf
        for place, (group, sequence) in enumerate(plan):
            if group.search is not None:
                continue
            guess = self._guesses.get(sequence)
            if guess is None or guess.tokens or self._num_steps >= guess.ask_at:
                guess = self._guess(sequence, guess)
                if guess.tokens and (room := self._room_for(sequence, guess)):
                    options.append(Option(place, guess.rate, room))
                    guesses[place] = guess
            ask_at = 0 if guess.tokens else guess.ask_at
            if ask_at < self._idle_until:
                self._idle_until = ask_at
        self.may_draft = not self._idle_until
        if not options:
            return []
        lens = self._choose(options, len(plan), self._limits.max_rows, self._times.at)
        if not any(lens):
            self._idle_until = self._num_steps + min(_MOST_IDLE, 1 + self._num_declined // 2)
            self._num_declined += 1
            self.may_draft = False
            return []
        self._num_declined = 0
        drafts = [NO_DRAFT] * len(plan)
        for place, guess in guesses.items():
            tokens = tuple(guess.tokens[guess.at : guess.at + lens[place]])
            drafts[place] = Draft.of(plan[place][1], tokens)
        return drafts

    # --- inside

    def _guess(self, sequence: Sequence, guess: _Guess | None) -> _Guess:
        """Returns the prediction for a sequence, which has no tokens if there is none. `guess` is the one so far."""
        outputs = sequence.output_ids
        if guess is None:
            guess = _Guess(self._limits.max_pause, num_outputs=len(outputs), rate=self._first_rate)
            self._guesses[sequence] = guess
        guess.compare(outputs, self._num_steps)
        if not guess.num_left and self._num_steps >= guess.ask_at:
            guess.tokens, guess.at, guess.was_right = self._drafter.predict(sequence), 0, False
            if not guess.tokens:
                guess.rest(self._num_steps)
        return guess

    def _expecting(self, plan: Plan) -> Seq[Sequence]:
        return [s for _, s in plan if (guess := self._guesses.get(s)) is not None and guess.num_left]

    def _forget_others(self, plan: Plan) -> None:
        """Drops the predictions for sequences that are not in this step."""
        kept = {sequence for _, sequence in plan}
        for sequence in [sequence for sequence in self._guesses if sequence not in kept]:
            guess = self._guesses.pop(sequence)
            if guess.num_compared >= _LEAST_COMPARED:
                self._first_rate += RATE_WEIGHT * (guess.rate - self._first_rate)
            self._drafter.drop(sequence)

    def _room_for(self, sequence: Sequence, guess: _Guess) -> int:
        """Returns the maximum length of the sequence's draft, which is not longer than the rest of the guess."""
        return min(guess.num_left, self._room(sequence))
