"""A sequence group in prefill, with its token sequences and the branches that continue them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from block_store.ledger.lane import Attempt
from common.group_need import most_held
from common.kv_retention import KvRules
from common.types import Branch, SamplingParams, StoppingParams, Timings
from engine.beam_search import Candidates
from engine.sequence import Sequence
from prefill_svc.pooling import Pool

if TYPE_CHECKING:
    from engine.sampler import Sampled
    from prefill_svc.early_tickets import EarlyTickets


@dataclass(slots=True, eq=False)
class Job:
    """A request in prefill. A token sequence is computed once, even if several branches continue it. The first sequence
    is the trunk. The others reuse the trunk's full blocks that precede their first different token.
    """

    sequences: list[Sequence]
    """The sequences to compute or, once the first tokens are drawn, the sequences of the branches that continue, in the
    request's order.
    """
    priority: int = 0
    arrived_ns: int = 0
    admitting_ns: int = 0
    """Time at which the ledger was last asked for the job's blocks."""
    started_ns: int = 0
    """Time at which the job got its blocks; 0 while the job waits."""
    delivered_ns: int = 0
    """Time at which the ledger had accepted the job's ticket; 0 if there is none."""
    cancelled: bool = False
    branches: list[tuple[int, int]] = field(default_factory=list)
    """For each branch, in the request's order: the index of the sequence that it continues, and its sample index."""
    common: list[int] = field(init=False)
    """Number of tokens that each sequence has in common with the trunk; 0 for the trunk itself."""
    width: int = field(init=False)
    """The number of branches, which is the number of tokens to draw."""
    drawn: dict[int, Sampled] = field(default_factory=dict)
    """The next token of each branch whose sequence is complete, by index in `branches`."""
    candidates: Candidates | None = None
    """First candidates of a beam search."""
    hand_over: Attempt = field(default_factory=Attempt)
    early: EarlyTickets | None = None
    """The early tickets that the request asks for, or None."""
    pool: Pool | None = None
    """The accumulator of the embedding, or None if the job draws tokens."""

    def __post_init__(self) -> None:
        self.branches = self.branches or [(i, s.sample_index) for i, s in enumerate(self.sequences)]
        self.width = len(self.branches)
        trunk, *others = self.sequences
        self.common = [0, *(len(trunk.prompt_ids) + _common(trunk.output_ids, s.output_ids) for s in others)]

    @classmethod
    def of(
        cls, prompt_ids: list[int], branches: Seq[Branch], sampling: SamplingParams, stopping: StoppingParams
    ) -> Job:
        """Returns a job for these branches of a prompt. Only the trunk computes log-probabilities of prompt tokens."""
        outputs = list(dict.fromkeys(branch.output_ids for branch in branches))
        places = [outputs.index(branch.output_ids) for branch in branches]
        without = sampling if sampling.prompt_logprobs is None else replace(sampling, prompt_logprobs=None)
        sequences = [
            Sequence(
                prompt_ids, list(ids), without if i else sampling, stopping, branches[places.index(i)].sample_index
            )
            for i, ids in enumerate(outputs)
        ]
        return cls(sequences, branches=[(at, b.sample_index) for at, b in zip(places, branches, strict=True)])

    @property
    def trunk(self) -> Sequence:
        return self.sequences[0]

    @property
    def is_beam_search(self) -> bool:
        return self.trunk.sampling.beam_width is not None

    @property
    def is_drawn(self) -> bool:
        return self.candidates is not None or len(self.drawn) == len(self.branches)

    @property
    def timings(self) -> Timings:
        """The times of a job that ends now."""
        now = time.monotonic_ns()
        return Timings(queue_ns=self.started_ns - self.arrived_ns, prefill_ns=now - self.started_ns)

    def start_over(self) -> None:
        """Resets the job to its state before the first step. Its blocks must have been released."""
        self.started_ns = 0
        self.drawn.clear()
        self.candidates = None
        if self.pool is not None:
            self.pool = Pool(self.pool.pooling)
        for sequence in self.sequences:
            sequence.num_computed = sequence.num_sealed = sequence.num_cached = 0
            sequence.prompt_logprobs.clear()

    @property
    def is_computed(self) -> bool:
        """Whether all positions of all sequences have been computed."""
        return all(sequence.num_computed == sequence.num_tokens for sequence in self.sequences)

    @property
    def num_uncomputed(self) -> int:
        """An upper bound on the number of positions that remain to be computed. Cached positions become known at
        admission.
        """
        trunk = self.sequences[0]
        if len(self.sequences) == 1:
            return trunk.num_tokens - trunk.num_computed
        pairs = zip(self.sequences, self.common, strict=True)
        return sum(s.num_tokens - max(s.num_computed, common) for s, common in pairs)

    def shared_blocks(self, index: int, block_size: int) -> int:
        """Returns the number of leading full blocks that sequence `index` shares with the trunk, which is 0 for the
        trunk itself. The block of the sequence's last token is never shared.
        """
        return min(self.common[index], self.sequences[index].num_tokens - 1) // block_size

    def num_blocks(self, rules: KvRules) -> int:
        """Returns the maximum number of different blocks that the sequences hold together, over all KV groups."""
        return most_held(rules, len(self.trunk.prompt_ids), [sequence.num_tokens for sequence in self.sequences])

    def branches_of(self, sequence: Sequence) -> Iterator[tuple[int, int]]:
        """Yields the index in `branches` and the sample index of each branch that continues `sequence`."""
        index = self.sequences.index(sequence)  # by identity
        return ((place, sample) for place, (origin, sample) in enumerate(self.branches) if origin == index)


def _common(first: Seq[int], other: Seq[int]) -> int:
    """Returns the length of the common prefix."""
    pairs = zip(first, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(other)))
