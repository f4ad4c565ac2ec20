"""The common part of the ways to choose drafts: their limits, and what steps with drafts have cost and gained."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from common.types import DraftCounts
from decode_svc.running_blocks import Plan
from decode_svc.sampling_step import Taken
from decode_svc.step_times import StepTimes
from engine.draft import Draft
from engine.sequence import Sequence

FIRST_RATE = 0.5
"""The share of right predictions that is assumed before the first one."""
RATE_WEIGHT = 0.15
"""Weight of the newest token in a sequence's rate of right predictions."""
_PACE_WEIGHT = 0.02
PLAIN_EVERY = 16
"""Once the time for a number of rows is known, the time of a step without drafts is recorded only in every sixteenth
step.
"""


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """The limits of drafts."""

    num_tokens: int
    """Maximum number of tokens of a draft."""
    max_rows: int
    """Maximum number of rows of a step, including the rows of drafts."""
    block_size: int
    max_model_len: int
    max_pause: int = 32
    """Maximum number of steps until the drafter is called again after a wrong or missing prediction. Without such
    pauses, calls would take a part of every step even if nothing can be predicted.
    """
    catch_up_share: float | None = 0.5
    """A draft model catches up with a sequence if that takes at most this part of the time that drafts are expected to
    save in the rest of the sequence. None: it always catches up, in the
    largest chunks, whatever that takes.
    """


class DraftPolicy(ABC):
    """The interface of what chooses the drafts of one worker's steps. The object is used in the step thread."""

    def __init__(self, limits: DraftLimits) -> None:
        self._limits = limits
        self._times = StepTimes()
        """Times of the target's steps."""
        self._num_steps = 0
        """Number of calls of `drafts`."""
        self._pace, self._drafted_at = 1.0, 0
        """The pace after the last step with drafts, and the number of that step."""
        self.wants_step = self.may_draft = True
        """Whether `note` must be called for the present step even if it has no drafts, and whether the next step may
        have drafts if its sequences are the same. These are attributes, and not methods, because even a method that
        returns at once takes a hundredth of a small model's step: the pass before has evicted it from the caches.
        """
        self.counts = DraftCounts(accepted_by_position=(0,) * limits.num_tokens)

    @property
    def pace(self) -> float:
        """The mean number of tokens that recent steps have added to a sample."""
        return 1.0 + (self._pace - 1.0) * (1.0 - _PACE_WEIGHT) ** (self._num_steps - self._drafted_at)

    @abstractmethod
    def drafts(self, plan: Plan) -> list[Draft]:
        """Returns one draft per sequence of the plan, or an empty list if there are no tokens to verify."""

    def note(self, taken: Seq[Taken], num_rows: int, seconds: float) -> None:
        """Records the tokens that a step of `num_rows` rows has added to samples, and the step's duration without the
        time that `drafts` took.
        """
        drafted = [] if num_rows == len(taken) else [item for item in taken if item.num_drafted]
        if drafted or self._num_steps % PLAIN_EVERY == 0 or not self._times.knows(num_rows):
            self._times.note(num_rows, seconds)
        if not drafted:
            return
        num_more = sum(len(item.samples) - 1 for item in drafted)
        self._drafted_at += 1  # the steps in between had no drafts
        pace = self.pace
        self._pace, self._drafted_at = pace + _PACE_WEIGHT * (1.0 + num_more / len(taken) - pace), self._num_steps
        accepted = list(self.counts.accepted_by_position)
        for item in drafted:
            for position in range(item.num_accepted):
                accepted[position] += 1
        num_tokens = self.counts.num_draft_tokens + sum(item.num_drafted for item in drafted)
        self.counts = DraftCounts(self.counts.num_drafts + len(drafted), num_tokens, tuple(accepted))

    def wanting_block(self, plan: Plan) -> list[Sequence]:
        """Returns the sequences of the next step whose drafts may need one more block than the sequences have."""
        return [each for each in self._expecting(plan) if self._most(each) > self._in_blocks(each)]

    @abstractmethod
    def _expecting(self, plan: Plan) -> Seq[Sequence]:
        """Returns the sequences of the next step for which predictions are at hand."""

    def _room(self, sequence: Sequence) -> int:
        """Returns the maximum length of the sequence's draft, which stays within the sequence's blocks."""
        return max(0, min(self._most(sequence), self._in_blocks(sequence)))

    def _most(self, sequence: Sequence) -> int:
        """Returns the maximum length of a draft, which ends before the last token that the sequence may have."""
        limits, num_outputs = self._limits, len(sequence.output_ids)
        left = min(sequence.stopping.max_tokens - num_outputs, limits.max_model_len - sequence.num_tokens) - 1
        return min(limits.num_tokens, left)

    def _in_blocks(self, sequence: Sequence) -> int:
        """Returns the number of positions in the sequence's blocks after the next one. A rejected position is never in
        a sealed block, because blocks are sealed when all their tokens are accepted.
        """
        size = self._limits.block_size
        num_blocks = max(len(sequence.table), sequence.num_computed // size + 1)
        return num_blocks * size - sequence.num_computed - 1
