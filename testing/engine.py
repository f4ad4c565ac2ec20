"""A small scheduler for tests and benchmarks. It prefills prompts in chunks under a token budget, and decodes sequences
whose prompts are complete. Blocks come in random order from an arena filled with NaN, and are not released. There is no
ledger.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from common.types import BlockRef, SamplingParams, StoppingParams
from engine.block_table import BlockTable
from engine.model_runner import ModelRunner
from engine.sampler import SampleRow, sample_rows
from engine.sequence import Chunk, Sequence, lay_out

GREEDY = SamplingParams(temperature=0.0)


def poisoned_arena(runner: ModelRunner, num_blocks: int) -> torch.Tensor:
    """Returns uint8 [num_blocks, block_bytes] on the runner's device, filled with 0xFF, so that unwritten slots read as
    NaN.
    """
    return runner.new_arena(num_blocks, fill=0xFF)


@dataclass
class Batch:
    """A batch of sequences over a runner's arena, with the logits from which each output token was drawn."""

    runner: ModelRunner
    sequences: list[Sequence]
    budget: int = 64
    logits: list[list[torch.Tensor]] = field(default_factory=list)  # per sequence and output token, [vocab]

    def __post_init__(self) -> None:
        self.logits = [[] for _ in self.sequences]

    @classmethod
    def of(
        cls, runner: ModelRunner, prompts: Seq[Seq[int]], new_tokens: int, *, budget: int = 64, seed: int = 0
    ) -> Batch:
        """Returns a batch of greedy sequences with all their blocks, over a new arena that is bound to the runner.
        `budget` is the maximum number of tokens in a step. `seed` determines the order of the blocks.
        """
        block_size, groups = runner.layout.block_size, len(runner.layout.groups)
        needs = [-(-(len(prompt) + new_tokens) // block_size) for prompt in prompts]
        runner.bind(poisoned_arena(runner, sum(needs) * groups))
        free = random.Random(seed).sample(range(sum(needs) * groups), sum(needs) * groups)
        stopping = StoppingParams(max_tokens=new_tokens)
        sequences = [Sequence(list(prompt), [], GREEDY, stopping) for prompt in prompts]
        for sequence, need in zip(sequences, needs, strict=True):
            sequence.set_tables(BlockTable(BlockRef(free.pop(), 1) for _ in range(need)) for _ in range(groups))
        return cls(runner, sequences, budget)

    def run(self) -> list[list[int]]:
        """Runs steps until every sequence has `max_tokens` output tokens. Returns the outputs."""
        while live := [s for s in self.sequences if len(s.output_ids) < s.stopping.max_tokens]:
            self.step(self._plan(live))
        return [s.output_ids for s in self.sequences]

    def _plan(self, live: list[Sequence]) -> list[Chunk]:
        chunks, left = [], self.budget
        for sequence in live:
            size = min(left, sequence.num_tokens - sequence.num_computed)
            if size > 0:
                chunks.append(Chunk(sequence, size))
                left -= size
        return chunks

    def step(self, chunks: list[Chunk]) -> None:
        """Runs one forward pass, and draws the next token of each sequence that the pass completes."""
        complete = [chunk.sequence for chunk in chunks if chunk.completes]
        logits = self.runner.step(lay_out(chunks, self.runner.layout.block_size).batch)
        for chunk in chunks:
            chunk.sequence.num_computed = chunk.end
        samples = sample_rows(logits, [SampleRow.of(s) for s in complete]) if complete else []
        for sequence, row, sampled in zip(complete, logits, samples, strict=True):
            self.logits[self.sequences.index(sequence)].append(row.clone())  # the next step may overwrite it
            sequence.output_ids.append(sampled.token_id)
