"""Samples tokens from logits. A token is a pure function of a row of logits, its parameters and (seed, sample,
position).

Random numbers are counter-based (Philox-4x32-10: Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011),
so there is no generator state. Filters are applied in vLLM's order: temperature, min_p, top_k, top_p. A single uniform
number then selects a token by inverse CDF over the kept set, in token-id order. Ties are broken by token id.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.cpu.forward import Draw, address
from kernels.cpu.loader import current, on_triton
from kernels.cpu.ops import entry, raise_for
from kernels.cpu.selection import count_fallback
from kernels.sampling_types import Numbers, TopLogprobs, column_of

_MASK = 0xFFFFFFFF


def philox_4x32_10(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Runs ten rounds of Philox-4x32 on 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, sample: int, position: int) -> float:
    """Returns the random number in [0, 1), a multiple of 2^-53, that belongs to (seed, sample, position)."""
    counter = (position & _MASK, (position >> 32) & _MASK, sample & _MASK, (sample >> 32) & _MASK)
    high, low, _, _ = philox_4x32_10(counter, (seed & _MASK, (seed >> 32) & _MASK))
    return ((high << 32 | low) >> 11) * 2.0**-53


def _kept(x: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Returns a bool [V] mask of the tokens that the three filters keep. x: float64 [V], logits divided by
    temperature.
    """
    order = torch.sort(x, descending=True, stable=True).indices  # stable: ties keep token-id order
    weights = torch.exp(x - x.max())
    kept = weights[order] >= min_p
    if 0 < top_k < len(x):
        kept[top_k:] = False
    sorted_weights = weights[order] * kept
    before = sorted_weights.cumsum(0) - sorted_weights
    kept &= (before < top_p * sorted_weights.sum()) if top_p < 1.0 else sorted_weights > 0
    kept[0] = True
    return torch.zeros_like(kept).scatter(0, order, kept)


def sample_reference(
    logits: Tensor,
    temperature: Numbers,
    top_k: Numbers,
    top_p: Numbers,
    min_p: Numbers,
    seeds: Numbers,
    sample_indices: Numbers,
    positions: Numbers,
) -> Tensor:
    """Computes `sample` row by row in float64, as the reference."""
    columns = [_tolist(c) for c in (temperature, top_k, top_p, min_p, seeds, sample_indices, positions)]
    out = torch.empty(logits.shape[0], dtype=torch.int64)
    for i, (heat, k, p, floor, seed, index, position) in enumerate(zip(*columns, strict=True)):
        if heat == 0:
            out[i] = torch.nonzero(logits[i] == logits[i].max())[0, 0]
            continue
        x = (logits[i].float() / heat).double()
        weights = torch.exp(x - x.max()) * _kept(x, int(k), p, floor)
        cdf = weights.cumsum(0)
        target = uniform(int(seed), int(index), int(position)) * cdf[-1]
        picked = torch.nonzero(cdf > target)
        out[i] = picked[0, 0] if len(picked) else torch.nonzero(weights)[-1, 0]
    return out


def _tolist(column: Numbers) -> list[float]:
    return column.tolist() if isinstance(column, Tensor) else list(column)


def sample(
    logits: Tensor,
    temperature: Numbers,
    top_k: Numbers,
    top_p: Numbers,
    min_p: Numbers,
    seeds: Numbers,
    sample_indices: Numbers,
    positions: Numbers,
) -> Tensor:
    """Samples one token per row; a row's result does not depend on the batch.

    logits: fp32 [B, V], penalties already applied; -inf bans a token. All other arguments have length B.
    temperature: >= 0; 0 selects the highest logit (the lowest id among equal ones).
    top_k: off if <= 0 or >= V.
    top_p: in [0, 1]; 1 is off. Keeps the smallest set of most likely tokens whose mass reaches top_p, at least one.
    min_p: in [0, 1]; 0 is off. Drops tokens less likely than min_p times the most likely one.
    seeds: 64 bits; sample_indices, positions: >= 0.
    Returns int64 [B]. Raises ValueError if shapes or dtypes do not fit.
    """
    if logits.dtype != torch.float32 or logits.dim() != 2 or logits.shape[1] == 0:
        raise ValueError("logits must be fp32 [B, V]")
    batch = logits.shape[0]
    if on_triton(logits):
        from kernels.gpu import sampling as gpu

        # Two copies to the device instead of seven.
        columns = [column_of(c, torch.float32, batch) for c in (temperature, top_p, min_p)]
        heat, p, floor = torch.stack(columns).to(logits.device, non_blocking=True)
        columns = [column_of(c, torch.int64, batch) for c in (top_k, seeds, sample_indices, positions)]
        ints = torch.stack(columns).to(logits.device, non_blocking=True)
        return gpu.sample(logits, heat, ints[0], p, floor, *ints[1:])
    library = current()
    if library.handle is None or logits.device.type != "cpu":
        if library.isa != "reference":
            count_fallback("sampling", f"no fast path on {logits.device.type}")
        return sample_reference(logits, temperature, top_k, top_p, min_p, seeds, sample_indices, positions)
    floats = [column_of(c, torch.float32, batch) for c in (temperature, top_p, min_p)]
    ints = [column_of(c, torch.int64, batch) for c in (top_k, seeds, sample_indices, positions)]
    out = torch.empty(batch, dtype=torch.int64)
    torch.ops.looseleaf.sample(out, logits if logits.stride(1) == 1 else logits.contiguous(), *floats, *ints)
    return out


class RepeatedSample:
    """`sample` with the same parameters in every step.

    Between two forward passes of decode, neither code nor data is in the caches any more. So this calls the C++ kernel
    without torch's dispatcher, with addresses that were looked up once. A pass can also run it (`FusedDecoder.run`).
    """

    def __init__(
        self, temperature: Numbers, top_k: Numbers, top_p: Numbers, min_p: Numbers, seeds: Numbers, samples: Numbers
    ) -> None:
        """Takes the parameters of `sample`, of equal length. `samples` are its `sample_indices`."""
        batch = len(temperature)
        floats = (column_of(c, torch.float32, batch) for c in (temperature, top_p, min_p))
        ints = (column_of(c, torch.int64, batch) for c in (top_k, seeds, samples))
        self._set(*(c.numpy() for c in (*floats, *ints)))

    def _set(self, *columns: npt.NDArray[Any]) -> None:
        batch = len(columns[0])
        self._columns = columns
        self._positions, self._ids = np.zeros(batch, np.int64), np.zeros(batch, np.int64)
        self._addresses = tuple(map(address, (self._ids, *columns, self._positions)))
        self.arguments = Draw(*self._addresses)
        """The arguments of a pass that runs the draw."""
        self._drawn_from: Tensor | None = None

    def repeated(self, counts: Seq[int]) -> Self:
        """Returns a draw with `counts[i]` adjacent rows for row i of this one."""
        other = object.__new__(type(self))
        other._set(*(column.repeat(counts) for column in self._columns))
        return other

    def at(self, positions: Seq[int]) -> Self:
        """Sets the positions of the tokens to draw."""
        self._positions[:], self._drawn_from = positions, None
        return self

    def note_drawn(self, logits: Tensor) -> None:
        """Records that a pass has run the draw from these logits."""
        self._drawn_from = logits

    def has_drawn(self, logits: Tensor) -> bool:
        """Returns whether a pass has run the draw from these logits, and `draw` has not returned its tokens yet."""
        return logits is self._drawn_from

    def draw(self, logits: Tensor) -> list[int]:
        """Returns one token per row of fp32 logits [B, V], like `sample`, unless a pass has already drawn them."""
        if not self.has_drawn(logits):
            self._run(logits)
        self._drawn_from = None
        drawn: list[int] = self._ids.tolist()
        return drawn

    def _run(self, logits: Tensor) -> None:
        library, (batch, vocab) = current(), logits.shape
        if library.handle is None or logits.device.type != "cpu" or logits.stride(1) != 1:
            heat, top_p, min_p, top_k, seeds, samples = map(torch.from_numpy, self._columns)
            at = torch.from_numpy(self._positions)
            self._ids[:] = sample(logits, heat, top_k, top_p, min_p, seeds, samples, at).tolist()
            return
        if logits.dtype != torch.float32 or batch != len(self._ids):
            raise ValueError(f"logits must be fp32 [{len(self._ids)}, V]")
        sizes = (batch, vocab, logits.stride(0), torch.get_num_threads())
        ids, *columns = self._addresses
        raise_for(entry(library, "ll_sample")(ids, logits.data_ptr(), *columns, *sizes))


def log_softmax_top_reference(logits: Tensor, token_ids: Tensor, k: int) -> TopLogprobs:
    """Computes `log_softmax_top` in plain torch, as the reference."""
    logprobs = torch.log_softmax(logits.double(), dim=-1).float()
    chosen = logits.gather(1, token_ids[:, None])
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :k]
    return TopLogprobs(
        logprobs.gather(1, token_ids[:, None])[:, 0], (logits > chosen).sum(1) + 1, order, logprobs.gather(1, order)
    )


def log_softmax_top(logits: Tensor, token_ids: Tensor, k: int) -> TopLogprobs:
    """Returns the log-probability and rank of each row's token in `token_ids`, and each row's k most likely tokens.

    logits: fp32 [B, V]; token_ids: int64 [B]; 0 <= k <= V. Sums run in a fixed order, so rows do not depend on the
    batch. Raises ValueError if shapes or dtypes do not fit or k is out of range, and on the C++ path also for an id out
    of range.
    """
    if logits.dtype != torch.float32 or logits.dim() != 2 or not 0 <= k <= logits.shape[1]:
        raise ValueError("logits must be fp32 [B, V] and 0 <= k <= V")
    if token_ids.dtype != torch.int64 or token_ids.shape != logits.shape[:1]:
        raise ValueError("token_ids must be int64 [B]")
    if on_triton(logits):
        from kernels.gpu import sampling as gpu

        return gpu.log_softmax_top(logits, token_ids, k)
    library = current()
    if library.handle is None or logits.device.type != "cpu":
        if library.isa != "reference":
            count_fallback("sampling", f"no fast path on {logits.device.type}")
        return log_softmax_top_reference(logits, token_ids, k)
    batch = logits.shape[0]
    result = TopLogprobs(
        torch.empty(batch),
        torch.empty(batch, dtype=torch.int64),
        torch.empty((batch, k), dtype=torch.int64),
        torch.empty((batch, k)),
    )
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    torch.ops.looseleaf.log_softmax_top(
        result.chosen, result.rank, result.top_ids, result.top, logits, token_ids.contiguous()
    )
    return result
