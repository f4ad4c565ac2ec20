"""The state of a sample in its grammar.

The state is not sent to other workers. A sequence that is prefilled again gets a new state, which first consumes the
tokens that the sequence already has.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from common.grammar import GrammarError
from common.types import StoppingParams

MAX_MASK_CPU_S = 0.25
"""Maximum CPU time in seconds to compute a mask. The computation delays the steps of all the worker's requests."""
Mask = npt.NDArray[np.uint8]
"""A bit mask over the vocabulary. Bit i % 8 of byte i // 8 is set if token i may follow."""


class GrammarState:
    """The state of one sample in its grammar. Only one thread at a time may use it."""

    __slots__ = (
        "_address", "_ends", "_error", "_followed", "_forced", "_mask", "_mask_at", "_matcher", "_stopping",
        "_unwanted",
    )  # fmt: skip

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, stopping: StoppingParams) -> None:
        """Takes ownership of `matcher`, which must be in its initial state."""
        self._init(matcher, stopping, 4 * -(-tokenizer.vocab_size // 32))
        self._unwanted = [token for token in tokenizer.eos_tokens if token not in stopping.stop_token_ids]

    def _init(self, matcher: LLMatcher, stopping: StoppingParams, mask_bytes: int) -> None:
        self._matcher = matcher
        self._stopping = stopping
        self._ends: list[int] = [t for t in stopping.stop_token_ids if t < 8 * mask_bytes]
        self._unwanted: list[int] = []
        """End tokens of the tokenizer that do not end the sequence."""
        self._followed = 0
        self._error = ""
        self._mask: Mask = np.zeros(mask_bytes, np.uint8)
        self._address = self._mask.ctypes.data
        self._mask_at = -1
        self._forced: Seq[int] | None = None
        """The tokens that the grammar forces next, one after another, in reverse order. Empty: it forces none, or only
        one. None: not known yet.
        """

    def fork(self) -> GrammarState:
        """Returns a copy of the state for another sample with the same tokens so far."""
        other = object.__new__(GrammarState)
        other._init(self._matcher.deep_copy(), self._stopping, len(self._mask))
        other._unwanted, other._followed, other._error = self._unwanted, self._followed, self._error
        other._forced = self._forced
        return other

    def follow(self, output_ids: Seq[int]) -> None:
        """Advances the state by the new tokens of `output_ids`, which is the sample's whole output. Raises ValueError
        if `output_ids` is shorter than in an earlier call.
        """
        if len(output_ids) < self._followed:
            raise ValueError(f"a sample of {self._followed} tokens cannot have {len(output_ids)}")
        for token in output_ids[self._followed :]:
            if not self._error:
                self._find_forced()
                self._forced = (self._forced or ())[:-1] or None
                if not self._matcher.consume_token(token):
                    self._error = "does not match the tokens so far, or became too complex after them"
        self._followed = len(output_ids)

    def is_over(self, output_ids: Seq[int]) -> bool:
        """Returns whether the grammar has ended, because an end token was sampled or no token can follow."""
        self.follow(output_ids)
        return not self._error and self._matcher.is_stopped() and not self._matcher.is_error()

    def mask(self, output_ids: Seq[int]) -> Mask:
        """Returns the mask of the tokens that may follow `output_ids`. It allows at least one token, and stays valid
        until the next call.

        Before `min_tokens`, stop tokens may follow only if no other token can. Raises GrammarError if the tokens do not
        match the grammar, if the grammar is too complex or the mask takes more than MAX_MASK_CPU_S, or if no token of
        the model may follow.
        """
        if self._mask_at == len(output_ids) == self._followed:
            return self._mask
        began = time.thread_time()
        self._follow_and_compute(output_ids)
        if not self._error and time.thread_time() - began > MAX_MASK_CPU_S:
            self._error = f"takes more than {MAX_MASK_CPU_S:g} s for a token"
        if self._error:
            raise GrammarError(self._error)
        self._mask_at = len(output_ids)
        return self._mask

    def masks_after(self, output_ids: Seq[int], token_ids: Seq[int], max_cpu_s: float) -> list[Mask]:
        """Returns the masks after each of the leading `token_ids`, as far as one after another may follow `output_ids`.
        There are fewer masks if one cannot be computed, or if they take longer than `max_cpu_s`. The state does not
        change. Raises GrammarError like `mask`.
        """
        began, mask, masks = time.thread_time(), self.mask(output_ids), list[Mask]()
        state, outputs = self.fork(), [*output_ids]
        for token in token_ids:
            if not allows(mask, token) or time.thread_time() - began > max_cpu_s:
                break
            outputs.append(token)
            state._follow_and_compute(outputs)
            if state._error:  # it is reported when the sequence has this token
                break
            mask = state._mask.copy()
            masks.append(mask)
        return masks

    def _follow_and_compute(self, output_ids: Seq[int]) -> None:
        """Sets `_mask` to the mask after `output_ids`, or sets `_error`."""
        self.follow(output_ids)
        if not self._error:
            self._compute(len(output_ids))

    def _find_forced(self) -> None:
        """Sets `_forced`. The matcher tokenizes the whole rest of a forced text to compute a mask, so the tokens are
        kept until the last one has been followed. They depend only on the tokens before the first of them: states that
        follow the same tokens have the same masks, wherever they begin.
        """
        if self._forced is None:
            forced = self._matcher.compute_ff_tokens()
            self._forced = forced[::-1] if len(forced) > 1 and self._is_only(forced[0]) else ()

    def _is_only(self, token: int) -> bool:
        """Returns whether no other token may follow, according to the matcher."""
        self._matcher.unsafe_compute_mask_ptr(self._address, len(self._mask))
        return allows(self._mask, token) and int(np.unpackbits(self._mask).sum()) == 1

    def _compute(self, position: int) -> None:
        self._find_forced()
        if self._forced:
            token = self._forced[-1]
            self._mask[:] = 0
            self._mask[token >> 3] = 1 << (token & 7)
            if token not in self._unwanted:
                return
        else:
            self._matcher.unsafe_compute_mask_ptr(self._address, len(self._mask))
        if self._matcher.is_error():
            self._error = "is too complex after the tokens so far"
            return
        _clear(self._mask, self._unwanted)
        if position < self._stopping.min_tokens:
            others = self._mask.copy()
            _clear(others, self._ends)
            if others.any():
                self._mask[:] = others
        if not self._mask.any():
            self._error = "lets no token of this model follow"


def allows(mask: Mask, token: int) -> bool:
    """Returns whether a token may follow, according to a mask."""
    return token >> 3 < len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)


def _clear(mask: Mask, tokens: Seq[int]) -> None:
    for token in tokens:
        mask[token >> 3] &= 0xFF ^ (1 << (token & 7))
