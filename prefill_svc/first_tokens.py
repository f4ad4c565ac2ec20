"""Turns the logits of complete sequences into the next token of every branch, or into the first candidates of a beam
search. One sampling call serves all samples of a step, even if their sampling parameters differ.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import torch

from engine.beam_search import BeamSearch
from engine.sampler import SampleRow, beam_candidates, prompt_logprobs, sample_rows
from engine.sequence import Chunk, Sequence
from prefill_svc.job import Job

Completed = tuple[Job, Sequence, int]
"""A job, its sequence that is complete, and the row of logits from which the next tokens are drawn."""


def take_prompt_logprobs(plan: Seq[tuple[Job, Chunk]], logits: torch.Tensor) -> list[Completed]:
    """Adds the log-probabilities of prompt tokens to their sequences. Returns the sequences that the step completes.
    Must be called before `num_computed` is increased.
    """
    completed: list[Completed] = []
    row = 0
    for job, chunk in plan:
        sequence = chunk.sequence
        k = sequence.sampling.prompt_logprobs
        num_rows = chunk.num_tokens if k is not None else int(chunk.completes)
        if k is not None:
            start = sequence.num_computed + 1
            targets = sequence.prompt_ids[start : chunk.end + 1]
            sequence.prompt_logprobs += prompt_logprobs(logits[row : row + len(targets)], targets, k)
        row += num_rows
        if chunk.completes:
            completed.append((job, sequence, row - 1))
    return completed


def draw(completed: Seq[Completed], logits: torch.Tensor, max_model_len: int) -> None:
    """Fills the jobs' `drawn` and `candidates` from fp32 logits [R, vocab]."""
    _draw_samples([item for item in completed if not item[0].is_beam_search], logits)
    _find_candidates([item for item in completed if item[0].is_beam_search], logits, max_model_len)


def _draw_samples(completed: Seq[Completed], logits: torch.Tensor) -> None:
    """Draws a token for each branch. The branches of a sequence draw from the same row, with different sample
    indices.
    """
    places: list[tuple[Job, int]] = []
    asked: list[SampleRow] = []
    sources: list[int] = []
    for job, sequence, row in completed:
        first = SampleRow.of(sequence)
        for place, sample_index in job.branches_of(sequence):
            places.append((job, place))
            asked.append(first if sample_index == first.sample_index else replace(first, sample_index=sample_index))
            sources.append(row)
    if asked:
        for (job, place), sampled in zip(places, sample_rows(logits[sources], asked), strict=True):
            job.drawn[place] = sampled


def _find_candidates(completed: Seq[Completed], logits: torch.Tensor, max_model_len: int) -> None:
    if not completed:
        return
    rows = [SampleRow.of(sequence) for _, sequence, _ in completed]
    counts = [BeamSearch(r.params, r.stopping, len(r.prompt_ids), max_model_len).num_candidates for r in rows]
    found = beam_candidates(logits[[row for _, _, row in completed]], rows, counts)
    for (job, _, _), candidates in zip(completed, found, strict=True):
        job.candidates = candidates
