"""From logits to tokens: bias, minimum length, penalties, then the draw; log-probabilities; a beam search's candidates.

Pure and vectorised over the batch.

Logits stay on their device; ids and log-probabilities come back.

A row's result depends on its logits, parameters, tokens, seed, sample and position, never on the rest of the batch.
Order and meaning as in vLLM: logit bias and min_tokens first, then repetition, frequency and presence penalties, then
temperature, min-p, top-k, top-p. Log-probabilities are those of the raw logits (vLLM's `raw_logprobs`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from common.types import SamplingParams, StoppingParams, TokenLogprob
from engine.beam import Candidates
from engine.sequence import Sequence
from kernels.sampling import log_softmax_top, sample


@dataclass(slots=True)
class SampleRow:
    """One row of logits: how its token is drawn and what came before."""

    params: SamplingParams
    stopping: StoppingParams
    prompt_ids: Seq[int]
    output_ids: Seq[int]
    sample_index: int
    position: int
    """Index of the token to be drawn: len(output_ids)."""

    @classmethod
    def of(cls, sequence: Sequence) -> SampleRow:
        """The next token of a sequence."""
        return cls(
            sequence.sampling,
            sequence.stopping,
            sequence.prompt_ids,
            sequence.output_ids,
            sequence.sample_index,
            len(sequence.output_ids),
        )


class Sampled(NamedTuple):
    """The token drawn for one row; `logprob` where the row asked for it."""

    token_id: int
    logprob: TokenLogprob | None


@torch.inference_mode()
def sample_rows(logits: torch.Tensor, rows: Seq[SampleRow]) -> list[Sampled]:
    """Draw one token per row of fp32 logits [B, vocab]; the logits are left as they are."""
    params = [row.params for row in rows]
    adjusted = _adjust(logits, rows)
    drawn = sample(
        adjusted,
        [p.temperature for p in params],
        [p.top_k for p in params],
        [p.top_p for p in params],
        [p.min_p for p in params],
        [p.seed for p in params],
        [row.sample_index for row in rows],
        [row.position for row in rows],
    )
    ids: list[int] = drawn.tolist()
    logprobs: list[TokenLogprob | None] = [None] * len(rows)
    asked = [index for index, p in enumerate(params) if p.logprobs is not None]
    if asked:
        counts = [params[index].logprobs or 0 for index in asked]
        found = _logprobs(logits[asked], [ids[index] for index in asked], counts)
        for index, logprob in zip(asked, found, strict=True):
            logprobs[index] = logprob
    return [Sampled(token_id, logprob) for token_id, logprob in zip(ids, logprobs, strict=True)]


@torch.inference_mode()
def prompt_logprobs(logits: torch.Tensor, target_ids: Seq[int], k: int) -> list[TokenLogprob]:
    """Log-probabilities of the prompt's own tokens: logits fp32 [P - 1, vocab] of positions 0..P-2, targets 1..P-1."""
    return _logprobs(logits, target_ids, [k] * len(target_ids)) if len(target_ids) else []


@torch.inference_mode()
def beam_candidates(logits: torch.Tensor, rows: Seq[SampleRow], counts: Seq[int]) -> list[Candidates]:
    """The most likely next tokens of beams: of each row of fp32 logits [B, vocab] its count, or the whole vocabulary.

    Log-probabilities are those after bias, min_tokens and penalties, since beams are judged by them; temperature and
    the filters do not apply.
    """
    if not len(rows):
        return []
    unused = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
    top = log_softmax_top(_adjust(logits, rows), unused, min(max(counts), logits.shape[1]))
    ids, values = top.top_ids.tolist(), top.top.tolist()
    return [Candidates(ids[i][:count], values[i][:count]) for i, count in enumerate(counts)]


def _logprobs(logits: torch.Tensor, token_ids: Seq[int], counts: Seq[int]) -> list[TokenLogprob]:
    """One entry per row, with that row's count of most likely tokens."""
    top = log_softmax_top(logits, torch.tensor(token_ids, dtype=torch.int64, device=logits.device), max(counts))
    chosen, ranks = top.chosen.tolist(), top.rank.tolist()
    ids, values = top.top_ids.tolist(), top.top.tolist()
    return [
        TokenLogprob(token, chosen[i], ranks[i], tuple(zip(ids[i][:count], values[i][:count], strict=True)))
        for i, (token, count) in enumerate(zip(token_ids, counts, strict=True))
    ]


# --- what changes logits before the draw


def _adjust(logits: torch.Tensor, rows: Seq[SampleRow]) -> torch.Tensor:
    """Logits [B, vocab] after bias, min_tokens and penalties; a copy only if some row has any of these."""
    biases = [(i, row) for i, row in enumerate(rows) if row.params.logit_bias]
    short = [(i, row) for i, row in enumerate(rows) if row.position < row.stopping.min_tokens]
    penalised = [(i, row) for i, row in enumerate(rows) if row.params.has_penalties]
    if not (biases or short or penalised):
        return logits
    logits = logits.clone()
    for index, row in biases:
        ids, values = zip(*row.params.logit_bias, strict=True)
        added = torch.tensor(values, dtype=logits.dtype, device=logits.device)
        logits[index].index_add_(0, torch.tensor(ids, device=logits.device), added)
    for index, row in short:
        if row.stopping.stop_token_ids:
            logits[index, list(row.stopping.stop_token_ids)] = -torch.inf
    if penalised:
        _penalise(logits, penalised)
    return logits


def _penalise(logits: torch.Tensor, rows: Seq[tuple[int, SampleRow]]) -> None:
    """Penalties in place, for all (row, token) pairs that occur at once.

    repetition (tokens of prompt or output): logit / r if positive, else logit * r; frequency: minus f * count in the
    output; presence: minus p if in the output.
    """
    parts, device = [_occurrences(row) for _, row in rows], logits.device
    lens = [len(tokens) for tokens, _ in parts]
    row_ids = torch.from_numpy(np.repeat([index for index, _ in rows], lens)).to(device)
    tokens = torch.from_numpy(np.concatenate([tokens for tokens, _ in parts])).to(device)
    counts = torch.from_numpy(np.concatenate([counts for _, counts in parts])).to(device, logits.dtype)

    def spread(values: list[float]) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.array(values, np.float32), lens)).to(device)

    repetition = spread([row.params.repetition_penalty for _, row in rows])
    frequency = spread([row.params.frequency_penalty for _, row in rows])
    presence = spread([row.params.presence_penalty for _, row in rows])
    values = logits[row_ids, tokens]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * counts
    values -= presence * (counts > 0)
    logits[row_ids, tokens] = values


def _occurrences(row: SampleRow) -> tuple[np.ndarray, np.ndarray]:
    """Distinct tokens of prompt and output, int64 [N], and how often each occurs in the output, int64 [N]."""
    outputs = np.array(row.output_ids, np.int64)
    if row.params.repetition_penalty == 1.0:
        return np.unique(outputs, return_counts=True)
    tokens, inverse = np.unique(np.concatenate((outputs, np.array(row.prompt_ids, np.int64))), return_inverse=True)
    return tokens, np.bincount(inverse[: len(outputs)], minlength=len(tokens))
