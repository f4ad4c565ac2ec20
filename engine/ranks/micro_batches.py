"""Micro-batches are the parts of a step that are in different stages of a pipeline at the same time.

A row's bits do not depend on the other rows, and attention reads keys from blocks. A step in parts therefore has the
same results as a whole step, provided that the parts pass through each layer in order.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.step import StepInput

WEIGHTS_IN_TOKENS = 10
"""The time to read a layer's weights, as the number of tokens that are computed in the same time. Measured with
`bench.ranks` on an EPYC with AVX512-BF16: decode of llama-125m takes 11.0 ms for one sequence, and about 1 ms more for
each further token.
"""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A part of a step."""

    step: StepInput
    places: slice | npt.NDArray[np.intp]
    """The indices of this part's requested rows among the requested rows of the whole step. They are a slice if they
    are consecutive.
    """

    @property
    def num_rows(self) -> int:
        return len(self.step.logits_rows)


def how_many(num_tokens: int, num_stages: int) -> int:
    """Returns the number of micro-batches for a step. With M micro-batches, S stages need M + S - 1 turns for a step of
    T tokens. A turn takes the time of W + T / M tokens, where W is WEIGHTS_IN_TOKENS. The total time is shortest for M
    = sqrt((S - 1) T / W).
    """
    return max(1, round(math.sqrt((num_stages - 1) * num_tokens / WEIGHTS_IN_TOKENS)))


def split(batch: StepInput, count: int) -> list[MicroBatch]:
    """Divides a step's tokens into `count` parts, in order, whose sizes differ by at most one. A sequence's tokens may
    be in several parts.
    """
    if count == 1:
        return [MicroBatch(batch, slice(0, len(batch.logits_rows)))]
    bounds = [len(batch.token_ids) * part // count for part in range(count + 1)]
    return [_cut(batch, begin, end) for begin, end in itertools.pairwise(bounds)]


def _cut(batch: StepInput, begin: int, end: int) -> MicroBatch:
    """Returns the part of a step from token `begin` to token `end`. In this part, a sequence's context ends with the
    sequence's last token in the part.
    """
    starts, wanted = batch.cu_seqlens_q, batch.logits_rows
    first, last = int(np.searchsorted(starts, begin, "right")) - 1, int(np.searchsorted(starts, end, "left"))
    places = np.flatnonzero((wanted >= begin) & (wanted < end))
    at = slice(places[0], places[-1] + 1) if len(places) else slice(0)
    step = StepInput(
        batch.token_ids[begin:end],
        batch.positions[begin:end],
        tuple(slots[begin:end] for slots in batch.slot_mappings),
        np.clip(starts[first : last + 1], begin, end) - np.int32(begin),
        batch.context_lens[first:last] - np.maximum(starts[first + 1 : last + 1] - np.int32(end), 0),
        tuple(table[first:last] for table in batch.block_tables),
        wanted[places] - begin,
        batch.adapters[first:last],
    )
    return MicroBatch(step, at if at.stop == (at.start or 0) + len(places) else places)
