"""The oracle is the reference for all other paths. It runs one sequence at a time in one process, with the same
kernels, but without a prefix cache or a scheduler. It builds its steps without `engine.sequence`, so it does not share
the bookkeeping of blocks and positions with the code under test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from common.types import KvLayout, SamplingParams, StoppingParams
from engine.beam_search import BeamSearch, Hypothesis
from engine.grammar_state import GrammarState
from engine.model_runner import ModelRunner
from engine.sampler import Sampled, SampleRow, beam_candidates, sample_rows
from engine.step import StepInput


class Oracle:
    """An oracle that runs a runner's model over private memory. After each call, the runner's arena is bound again."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        stopping: StoppingParams,
        *,
        sample_index: int = 0,
        chunk: int | None = None,
    ) -> list[int]:
        """Returns the output token ids, including the stop token. `chunk` is the number of tokens per prefill step
        (default: the whole prompt).
        """
        drawn = self.draw(prompt_ids, sampling, stopping, sample_index=sample_index, chunk=chunk)
        return [sampled.token_id for sampled in drawn]

    def draw(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        stopping: StoppingParams,
        *,
        sample_index: int = 0,
        chunk: int | None = None,
        begin: Callable[[], GrammarState] | None = None,
    ) -> list[Sampled]:
        """Returns the tokens that `generate` returns, with their log-probabilities if `sampling` requests them. `begin`
        returns a new grammar state, and is called for each token; None means that the output has no grammar.
        """
        outputs, drawn = list[int](), list[Sampled]()
        limit = min(stopping.max_tokens, self._runner.max_model_len - len(prompt_ids))
        with self._runner.using(self._arena(len(prompt_ids) + limit)):
            logits = self._prefill(prompt_ids, chunk, last_only=True)
            while True:
                row = SampleRow(sampling, stopping, prompt_ids, outputs, sample_index, len(outputs), begin and begin())
                drawn += sample_rows(logits, [row])
                outputs.append(drawn[-1].token_id)
                stopped = outputs[-1] in stopping.stop_token_ids and len(outputs) >= stopping.min_tokens
                stopped = stopped or (begin is not None and begin().is_over(outputs))
                if stopped or len(outputs) >= limit:
                    return drawn
                logits = self._decode(prompt_ids, outputs)

    def beam_search(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, stopping: StoppingParams
    ) -> list[Hypothesis]:
        """Returns the requested number of beams, the best first. Each beam is computed alone, over a separate arena."""
        search = BeamSearch(sampling, stopping, len(prompt_ids), self._runner.max_model_len)
        limit = min(stopping.max_tokens, self._runner.max_model_len - len(prompt_ids))
        arenas = [self._arena(len(prompt_ids) + limit)]
        with self._runner.using(arenas[0]):
            logits = [self._prefill(prompt_ids, None, last_only=True)]
        while not search.done:
            rows = [SampleRow(sampling, stopping, prompt_ids, b.token_ids, 0, len(b.token_ids)) for b in search.running]
            pairs = zip(logits, rows, strict=True)
            parents = search.advance([beam_candidates(x, [row], [search.num_candidates])[0] for x, row in pairs])
            arenas, logits = [arenas[parent].clone() for parent in parents], []
            for arena, beam in zip(arenas, search.running, strict=True):
                with self._runner.using(arena):
                    logits.append(self._decode(prompt_ids, beam.token_ids).clone())  # the next step may overwrite it
        return search.best()

    def logits(self, token_ids: Sequence[int], *, chunk: int | None = None) -> torch.Tensor:
        """Returns teacher-forced fp32 logits [len(token_ids), vocab]. Row i predicts token i + 1."""
        with self._runner.using(self._arena(len(token_ids))):
            return self._prefill(token_ids, chunk, last_only=False)

    def _arena(self, num_tokens: int) -> torch.Tensor:
        """Returns blocks for one sequence, filled with 0xff, so that an unwritten slot reads as NaN."""
        layout = self._runner.layout
        return self._runner.new_arena(-(-num_tokens // layout.block_size) * len(layout.groups), fill=0xFF)

    def _decode(self, prompt_ids: Sequence[int], outputs: Sequence[int]) -> torch.Tensor:
        """Runs the model on the newest output token. Returns logits [1, vocab]."""
        position = len(prompt_ids) + len(outputs) - 1
        return self._runner.step(_one_sequence(outputs[-1:], position, self._runner.layout, last_only=True))

    def _prefill(self, token_ids: Sequence[int], chunk: int | None, *, last_only: bool) -> torch.Tensor:
        """Computes the prompt in chunks. Returns the logits of the last token [1, vocab], or of all tokens [T,
        vocab].
        """
        size = chunk or len(token_ids)
        starts = range(0, len(token_ids), size)
        parts = [
            self._runner.step(
                _one_sequence(token_ids[start : start + size], start, self._runner.layout, last_only=last_only)
            ).clone()  # the next step may overwrite it
            for start in starts
        ]
        return parts[-1] if last_only else torch.cat(parts)


def _one_sequence(token_ids: Sequence[int], start: int, layout: KvLayout, *, last_only: bool) -> StepInput:
    """Returns the step of one sequence that computes position `start` and all later positions. With G KV groups, block
    i of group g is block i * G + g of the arena.
    """
    end, size, groups = start + len(token_ids), layout.block_size, len(layout.groups)
    positions = np.arange(start, end, dtype=np.int64)
    columns, offsets = positions // size, positions % size
    tables = [np.arange(-(-end // size), dtype=np.int32) * groups + group for group in range(groups)]
    return StepInput(
        np.array(token_ids, np.int64),
        positions,
        tuple(table[columns].astype(np.int64) * size + offsets for table in tables),
        np.array([0, len(token_ids)], np.int32),
        np.array([end], np.int32),
        tuple(table[None] for table in tables),
        np.array([len(token_ids) - 1], np.int64) if last_only else np.arange(len(token_ids), dtype=np.int64),
    )
