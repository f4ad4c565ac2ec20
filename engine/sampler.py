"""The sampler, which turns logits into tokens, log-probabilities and beam candidates. Logits stay on their device; ids
and log-probabilities are returned to the host.

A row's result depends on its logits, parameters, tokens, grammar, seed, sample and position, not on the rest of the
batch. The parameters have the same meaning as in vLLM. They are applied in this order: logit bias, bad words and
min_tokens; repetition, frequency and presence penalties; the grammar's mask and the allowed tokens; temperature, min-p,
top-k and top-p. Log-probabilities are those of the raw logits (vLLM's `raw_logprobs`), so a grammar or a bias does not
change them. Beam candidates are an exception (`beam_candidates`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from common.types import SamplingParams, StoppingParams, TokenLogprob
from engine.beam_search import Candidates
from engine.draft import Ahead
from engine.grammar_state import GrammarState, Mask
from engine.sequence import Sequence
from kernels.sampling import RepeatedSample, log_softmax_top


@dataclass(slots=True)
class SampleRow:
    """The sampling parameters of one row of logits, and the tokens that precede it."""

    params: SamplingParams
    stopping: StoppingParams
    prompt_ids: Seq[int]
    output_ids: Seq[int]
    sample_index: int
    position: int
    """Index of the token to draw, which is len(output_ids)."""
    grammar: GrammarState | None = None
    ahead: Mask | None = None
    """The grammar's mask after the tokens of a draft."""

    @classmethod
    def of(cls, sequence: Sequence, ahead: Ahead | None = None) -> SampleRow:
        """Returns the row of a sequence's next token, or of the token after the tokens `ahead` of a draft."""
        outputs = [*sequence.output_ids, *ahead.token_ids] if ahead else sequence.output_ids
        return cls(
            sequence.sampling, sequence.stopping, sequence.prompt_ids, outputs, sequence.sample_index, len(outputs),
            sequence.grammar, ahead and ahead.mask,
        )  # fmt: skip

    @property
    def mask(self) -> Mask:
        """The mask of the row, which must have a grammar. Raises GrammarError like `GrammarState.mask`."""
        assert self.grammar is not None
        return self.grammar.mask(self.output_ids) if self.ahead is None else self.ahead


class Sampled(NamedTuple):
    """The token drawn for one row. `logprob` is set if the row requested it."""

    token_id: int
    logprob: TokenLogprob | None


class Columns:
    """The parameters of a batch, which do not change from step to step, and the rows that need additional work."""

    __slots__ = ("adjusted", "asked", "counts", "sample")

    def __init__(self, rows: Seq[SampleRow]) -> None:
        params = [row.params for row in rows]
        heat, top_k = [p.temperature for p in params], [p.top_k for p in params]
        top_p, min_p = [p.top_p for p in params], [p.min_p for p in params]
        seeds = [p.seed & 0xFFFF_FFFF_FFFF_FFFF for p in params]  # 64 bits, any sign
        self.sample = RepeatedSample(heat, top_k, top_p, min_p, seeds, [row.sample_index for row in rows])
        self.adjusted = [i for i, row in enumerate(rows) if _may_adjust(row)]
        """Rows whose logits may be changed before the draw."""
        self.asked = [i for i, p in enumerate(params) if p.logprobs is not None]
        """Rows that request log-probabilities. `counts` contains the number of most likely tokens that each of them
        requests.
        """
        self.counts = [params[i].logprobs or 0 for i in self.asked]

    def repeated(self, num_rows: Seq[int]) -> Columns:
        """Returns the columns of a batch with `num_rows[i]` adjacent rows for row i of this one."""
        ends = list(accumulate(num_rows))

        def rows(places: Seq[int]) -> list[int]:
            return [row for place in places for row in range(ends[place] - num_rows[place], ends[place])]

        other, asked = object.__new__(Columns), zip(self.asked, self.counts, strict=True)
        other.sample, other.adjusted = self.sample.repeated(num_rows), rows(self.adjusted)
        other.asked, other.counts = rows(self.asked), [count for place, count in asked for _ in range(num_rows[place])]
        return other

    def logprobs(self, logits: torch.Tensor, ids: Seq[int]) -> list[TokenLogprob | None]:
        """Returns the log-probabilities of the sampled tokens, from unchanged logits. The entry of a row that does not
        request them is None.
        """
        found: list[TokenLogprob | None] = [None] * len(ids)
        if self.asked:
            values = _logprobs(logits[self.asked], [ids[row] for row in self.asked], self.counts)
            for row, value in zip(self.asked, values, strict=True):
                found[row] = value
        return found


@torch.inference_mode()
def sample_rows(logits: torch.Tensor, rows: Seq[SampleRow]) -> list[Sampled]:
    """Draws one token per row of fp32 logits [B, vocab]. The logits are not changed."""
    columns = Columns(rows)
    adjusted = adjust(logits, [(i, rows[i]) for i in columns.adjusted])
    ids = columns.sample.at([row.position for row in rows]).draw(adjusted)
    return list(map(Sampled, ids, columns.logprobs(logits, ids)))


@torch.inference_mode()
def prompt_logprobs(logits: torch.Tensor, target_ids: Seq[int], k: int) -> list[TokenLogprob]:
    """Returns the log-probabilities of a prompt's tokens 1..P-1 (`target_ids`), from the logits fp32 [P - 1, vocab] of
    positions 0..P-2, with the `k` most likely tokens at each position.
    """
    return _logprobs(logits, target_ids, [k] * len(target_ids)) if len(target_ids) else []


@torch.inference_mode()
def beam_candidates(logits: torch.Tensor, rows: Seq[SampleRow], counts: Seq[int]) -> list[Candidates]:
    """Returns the `counts[i]` most likely next tokens for each row i of fp32 logits [B, vocab], or the whole vocabulary
    if it is smaller.

    The log-probabilities are those of the logits after bias, bans, min_tokens, penalties and grammars. Temperature,
    min-p, top-k and top-p do not apply.
    """
    if not len(rows):
        return []
    unused = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
    top = log_softmax_top(adjust(logits, list(enumerate(rows))), unused, min(max(counts), logits.shape[1]))
    ids, values = top.top_ids.tolist(), top.top.tolist()
    return [Candidates(ids[i][:count], values[i][:count]) for i, count in enumerate(counts)]


def _logprobs(logits: torch.Tensor, token_ids: Seq[int], counts: Seq[int]) -> list[TokenLogprob]:
    """Returns the log-probabilities of `token_ids[i]` and of the `counts[i]` most likely tokens for each row i."""
    top = log_softmax_top(logits, torch.tensor(token_ids, dtype=torch.int64, device=logits.device), max(counts))
    chosen, ranks = top.chosen.tolist(), top.rank.tolist()
    ids, values = top.top_ids.tolist(), top.top.tolist()
    return [
        TokenLogprob(token, chosen[i], ranks[i], tuple(zip(ids[i][:count], values[i][:count], strict=True)))
        for i, (token, count) in enumerate(zip(token_ids, counts, strict=True))
    ]


# --- changes of logits before sampling

_BANS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf).astype(
    np.float32
)
"""[256, 8]: the values that a byte of a mask adds to the logits of its eight tokens."""


def _may_adjust(row: SampleRow) -> bool:
    """Returns whether `adjust` may change a row, at this or a later position."""
    if row.grammar is not None:
        return True
    params = row.params
    banned = bool(params.bad_token_ids) or params.allowed_token_ids is not None
    return banned or bool(params.logit_bias) or row.stopping.min_tokens > 0 or params.has_penalties


def adjust(logits: torch.Tensor, rows: Seq[tuple[int, SampleRow]]) -> torch.Tensor:
    """Returns logits [B, vocab] with the changes that these rows require, or `logits` itself if no row requires a
    change. For a row with a grammar, the grammar's mask applies min_tokens.
    """
    biases = [(i, row) for i, row in rows if row.params.logit_bias]
    short = [(i, row) for i, row in rows if row.position < row.stopping.min_tokens and row.grammar is None]
    penalised = [(i, row) for i, row in rows if row.params.has_penalties]
    masked = [(i, row) for i, row in rows if row.grammar is not None]
    narrow = [(i, row) for i, row in rows if row.params.allowed_token_ids is not None]
    banned = [(i, ids) for i, row in rows if (ids := banned_next(row.params.bad_token_ids, row.output_ids))]
    if not (biases or short or penalised or masked or narrow or banned):
        return logits
    only_masks = not (biases or short or penalised or narrow or banned)
    if only_masks and len(masked) == len(logits) and logits.device.type == "cpu":
        bans = _bans(np.stack([row.mask for _, row in masked]), logits.shape[1])
        return torch.from_numpy(logits.numpy() + bans)  # without a copy before
    logits = _copy(logits)
    flat = logits.view(-1)
    if biases:
        places = _places([(i, [token for token, _ in row.params.logit_bias]) for i, row in biases], logits.shape[1])
        values = torch.tensor([value for _, row in biases for _, value in row.params.logit_bias], dtype=logits.dtype)
        flat.index_add_(0, torch.from_numpy(places).to(logits.device), values.to(logits.device))
    banned += [(i, row.stopping.stop_token_ids) for i, row in short]
    if banned:
        flat[torch.from_numpy(_places(banned, logits.shape[1])).to(logits.device)] = -torch.inf
    if penalised:
        _penalise(logits, penalised)
    if masked:
        _mask(logits, masked)
    for i, row in narrow:
        _narrow(logits[i], row.params.allowed_token_ids or ())
    return logits


def banned_next(bad_token_ids: Seq[Seq[int]], output_ids: Seq[int]) -> list[int]:
    """Returns the tokens that would complete one of the bad sequences after this output (vLLM's `bad_words`)."""
    found = []
    for *head, last in bad_token_ids:
        start = len(output_ids) - len(head)
        if start >= 0 and list(output_ids[start:]) == head:
            found.append(last)
    return found


def _narrow(row: torch.Tensor, allowed: Seq[int]) -> None:
    """Bans all tokens of a row [vocab] except `allowed`, in place."""
    at = torch.tensor(allowed, device=row.device)
    kept = row[at]
    row.fill_(-torch.inf)
    row[at] = kept


def _copy(logits: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous copy. On a CPU, numpy makes it, because starting torch's threads would take longer."""
    if logits.device.type == "cpu":
        return torch.from_numpy(np.array(logits.numpy(), order="C"))
    return logits.clone(memory_format=torch.contiguous_format)


def _mask(logits: torch.Tensor, rows: Seq[tuple[int, SampleRow]]) -> None:
    """Bans, in place, the tokens that a row's grammar does not allow. Raises GrammarError like `GrammarState.mask`."""
    masks = np.stack([row.mask for _, row in rows])
    if logits.device.type == "cpu":
        values = logits.numpy()
        for (i, _), ban in zip(rows, _bans(masks, values.shape[1]), strict=True):
            values[i] += ban
        return
    allowed = np.unpackbits(masks, axis=1, count=logits.shape[1], bitorder="little")
    banned = torch.from_numpy(allowed).to(logits.device) == 0
    at = torch.tensor([i for i, _ in rows], device=logits.device)
    logits[at] = logits[at].masked_fill_(banned, -torch.inf)


def _bans(masks: Mask, vocab_size: int) -> npt.NDArray[np.float32]:
    """Returns what masks [B, bytes] add to logits, fp32 [B, vocab]."""
    return _BANS.take(masks, axis=0).reshape(len(masks), -1)[:, :vocab_size]


def _places(tokens: Seq[tuple[int, Seq[int]]], vocab_size: int) -> npt.NDArray[np.int64]:
    """Returns the int64 indices of the tokens in flattened logits [B, vocab]. `tokens` contains pairs of a row and its
    tokens.

    Raises IndexError for a token outside the vocabulary, because its index could belong to another row.
    """
    lens = [len(ids) for _, ids in tokens]
    places = np.fromiter(chain.from_iterable(ids for _, ids in tokens), np.int64, sum(lens))
    if len(places) and not 0 <= places.min() <= places.max() < vocab_size:
        raise IndexError(f"token ids must be below the vocabulary's size, {vocab_size}; got up to {places.max()}")
    places += np.repeat(np.array([row for row, _ in tokens], np.int64) * vocab_size, lens)
    return places


def _penalise(logits: torch.Tensor, rows: Seq[tuple[int, SampleRow]]) -> None:
    """Applies the penalties of all rows in place. The repetition penalty r turns the logit x of a token in the prompt
    or the output into x / r if x > 0, else into x * r. The logit of a token in the output then decreases by the
    frequency penalty times the token's count, and by the presence penalty.
    """
    flat, vocab_size = logits.view(-1), logits.shape[1]
    columns = np.ones((3, len(logits)), np.float32)  # repetition, frequency, presence of each row
    for row, entry in rows:
        params = entry.params
        columns[:, row] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty

    def on_device(values: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(logits.device)

    repeated = [(i, [*row.prompt_ids, *row.output_ids]) for i, row in rows if row.params.repetition_penalty != 1.0]
    if repeated:
        # A token that occurs twice is written twice with the same value. Finding the distinct tokens would cost more.
        places = _places(repeated, vocab_size)
        penalty, at = on_device(columns[0, places // vocab_size]), on_device(places)
        values = flat[at]
        flat[at] = torch.where(values > 0, values / penalty, values * penalty)
    produced = [(i, row.output_ids) for i, row in rows if row.params.frequency_penalty or row.params.presence_penalty]
    if produced:
        places, counts = np.unique(_places(produced, vocab_size), return_counts=True)
        _, frequency, presence = columns[:, places // vocab_size]
        at = on_device(places)
        flat[at] = flat[at] - on_device(frequency * counts.astype(np.float32)) - on_device(presence)
