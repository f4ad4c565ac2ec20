"""Decides which drafts the next step verifies, for speculative decoding (docs/speculation.md).

A drafter predicts the tokens that follow each sequence. The tokens that are drawn later show how often the drafter is
right, even if no step verified its prediction. A row is used only if it is expected to increase the number of tokens
per second. This module allocates no blocks, and reads no clock.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from common.types import DraftCounts
from decode_svc.draft_lengths import Choose, Option, best_lengths
from decode_svc.running_blocks import Plan
from decode_svc.sampling_step import Taken
from decode_svc.step_times import StepTimes
from engine.draft import NO_DRAFT, Draft
from engine.sequence import Sequence

_FIRST_RATE = 0.5
_WEIGHT = 0.15
"""Weight of the newest token in a sequence's rate of right predictions."""
_PACE_WEIGHT = 0.02
_PLAIN_EVERY = 8
"""Once the time for a number of rows is known, the time of a step without drafts is recorded only in every eighth step.
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
    """Number of leading tokens that have turned out right."""
    num_outputs: int = 0
    """Length of the sequence's output when the guess was last compared with it."""
    rate: float = _FIRST_RATE
    """Estimated probability that the next token of a prediction is right."""
    pause: int = 0
    """Number of tokens for which the drafter is not called after a wrong or missing prediction. Such a prediction
    roughly doubles this number, and each token that was predicted correctly halves it.
    """
    ask_at: int = 0
    """Length of the output at which the drafter is called again."""

    def compare(self, output_ids: Seq[int]) -> None:
        """Compares the guess with the new tokens. After a wrong token, there is no guess."""
        for token in output_ids[self.num_outputs :]:
            if self.at == len(self.tokens):
                break
            is_right = self.tokens[self.at] == token
            self.rate += _WEIGHT * (is_right - self.rate)
            if is_right:
                self.at += 1
                self.pause //= 2
            else:
                self.tokens, self.at = (), 0
                self.rest(len(output_ids))
        self.num_outputs = len(output_ids)

    def rest(self, num_outputs: int) -> None:
        """Postpones the next call of the drafter, after a wrong or missing prediction."""
        self.pause = min(self.max_pause, 2 * self.pause + 1)
        self.ask_at = num_outputs + self.pause


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """The limits of drafts."""

    num_tokens: int
    """Maximum number of tokens of a draft."""
    max_rows: int
    """Maximum number of rows of a step, including the rows of drafts."""
    block_size: int
    max_model_len: int
    max_pause: int = 16
    """Maximum number of tokens for which the drafter is not called after a wrong or missing prediction. Without such
    pauses, calls would take a part of every step even if nothing can be predicted.
    """


class Speculation:
    """Chooses the drafts of one worker's steps. The object is used in the step thread."""

    def __init__(self, drafter: Drafter, limits: DraftLimits, choose: Choose = best_lengths) -> None:
        self._drafter = drafter
        self._limits = limits
        self._choose = choose
        self._guesses: dict[Sequence, _Guess] = {}
        self._times = StepTimes()
        self._num_steps = 0
        self.pace = 1.0
        """The mean number of tokens that recent steps have added to a sample."""
        self.counts = DraftCounts(accepted_by_position=(0,) * limits.num_tokens)

    def drafts(self, plan: Plan) -> list[Draft]:
        """Returns one draft per sequence of the plan, or an empty list if there are no tokens to verify."""
        options, guesses = list[Option](), dict[int, _Guess]()
        for place, (group, sequence) in enumerate(plan):
            guess = None if group.search is not None else self._guess(sequence)
            if guess is not None and (room := self._room(sequence, guess)):
                options.append(Option(place, guess.rate, room))
                guesses[place] = guess
        self._forget_others(plan)
        if not options:
            return []
        lens = self._choose(options, len(plan), self._limits.max_rows, self._times.at)
        if not any(lens):
            return []
        drafts = [NO_DRAFT] * len(plan)
        for place, guess in guesses.items():
            tokens = tuple(guess.tokens[guess.at : guess.at + lens[place]])
            drafts[place] = Draft.of(plan[place][1], tokens)
        return drafts

    def note(self, taken: Seq[Taken], num_rows: int, seconds: float) -> None:
        """Records the tokens that a step of `num_rows` rows has added to samples, and the step's duration."""
        drafted = [item for item in taken if item.num_drafted]
        self._num_steps += 1
        if drafted or self._num_steps % _PLAIN_EVERY == 0 or not self._times.knows(num_rows):
            self._times.note(num_rows, seconds)
        if taken:
            num_more = sum(len(item.samples) - 1 for item in drafted)
            self.pace += _PACE_WEIGHT * (1.0 + num_more / len(taken) - self.pace)
        if drafted:
            accepted = list(self.counts.accepted_by_position)
            for item in drafted:
                for position in range(item.num_accepted):
                    accepted[position] += 1
            num_tokens = self.counts.num_draft_tokens + sum(item.num_drafted for item in drafted)
            self.counts = DraftCounts(self.counts.num_drafts + len(drafted), num_tokens, tuple(accepted))

    # --- inside

    def _guess(self, sequence: Sequence) -> _Guess | None:
        """Returns the prediction for a sequence, or None if there is none."""
        guess, outputs = self._guesses.get(sequence), sequence.output_ids
        if guess is None:
            guess = self._guesses[sequence] = _Guess(self._limits.max_pause, num_outputs=len(outputs))
        elif not guess.tokens and len(outputs) < guess.ask_at:
            return None
        guess.compare(outputs)
        if guess.at == len(guess.tokens) and len(outputs) >= guess.ask_at:
            guess.tokens, guess.at = self._drafter.predict(sequence), 0
            if not guess.tokens:
                guess.rest(len(outputs))
        return guess if guess.tokens else None

    def _forget_others(self, plan: Plan) -> None:
        """If there are more predictions than sequences in this step, drops those for sequences that are not in the
        step.
        """
        if len(self._guesses) > len(plan):
            kept = {sequence for _, sequence in plan}
            for sequence in [sequence for sequence in self._guesses if sequence not in kept]:
                del self._guesses[sequence]
                self._drafter.drop(sequence)

    def _room(self, sequence: Sequence, guess: _Guess) -> int:
        """Returns the maximum length of the sequence's draft. The draft stays within the block to which the sequence
        writes, so it needs no new block, and a rejected position is in a block that is not sealed. No draft is needed
        after the last token that the sequence may have.
        """
        limits, num_outputs = self._limits, len(sequence.output_ids)
        left = min(sequence.stopping.max_tokens - num_outputs, limits.max_model_len - sequence.num_tokens) - 1
        in_block = limits.block_size - 1 - sequence.num_computed % limits.block_size
        return max(0, min(limits.num_tokens, len(guess.tokens) - guess.at, in_block, left))
