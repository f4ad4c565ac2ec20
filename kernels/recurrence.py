"""Computes layers with a recurrent state in blocks, by a short causal convolution and a gated linear recurrence.

A block of a sequence's table holds the state after the block's last computed position. A chunk reads its initial state
from the block of the preceding position, and writes the state into each block that it fills and into the block of its
last position. One recurrence serves Mamba (arXiv 2312.00752), Mamba-2 (arXiv 2405.21060) and the gated delta rule
(arXiv 2412.06464). It is computed token by token even in a prompt, so a row's bits do not depend on how a sequence is
divided into steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.loader import current, on_triton
from kernels.cpu.selection import count_fallback

MAX_TAPS = 16
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class StateBatch:
    """The sequences of a step, whose T tokens are packed one sequence after another."""

    block_table: Tensor  # int32 [B, max_blocks]
    context_lens: Tensor  # int32 [B], including this step's tokens
    cu_seqlens: Tensor  # int32 [B + 1]
    block_size: int

    def tokens_within(self, num_blocks: int) -> list[tuple[int, int | None, int | None]]:
        """Returns `tokens` as a list. Raises ValueError if a sequence is longer than its block table allows, a chunk is
        longer than its context, or a block is not below `num_blocks`.
        """
        ends, starts = self.context_lens, self.cu_seqlens
        if (ends > self.block_table.shape[1] * self.block_size).any():
            raise ValueError("a block table is too short for its sequence")
        if (starts.diff() > ends).any():
            raise ValueError("a chunk is longer than its context")
        found = list(self.tokens())
        if any(block is not None and block >= num_blocks for _, *blocks in found for block in blocks):
            raise ValueError(f"a block number is out of range: there are {num_blocks} blocks of states")
        return found

    def tokens(self) -> Iterator[tuple[int, int | None, int | None]]:
        """Yields each token's row, the block to read the state from, and the block to write the state to. The former is
        None unless the token is the first of a chunk, and -1 at the start of a sequence. The latter may be None.
        """
        size, starts = self.block_size, self.cu_seqlens.tolist()
        for index, (end, table) in enumerate(zip(self.context_lens.tolist(), self.block_table.tolist(), strict=True)):
            begin = end - (starts[index + 1] - starts[index])
            for position in range(begin, end):
                before = table[(position - 1) // size] if position else -1
                is_kept = (position + 1) % size == 0 or position + 1 == end
                row = starts[index] + position - begin
                yield row, before if position == begin else None, table[position // size] if is_kept else None


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, states: Tensor, batch: StateBatch
) -> Tensor:
    """Computes a causal convolution of each channel, followed by SiLU if `silu` is True. Returns [T, C].

    x: [T, C], rows may be strided. weight: [C, taps], of x's dtype; bias: [C] or None.
    states: fp32 [num_blocks, (taps - 1) * C], strided: the last inputs, oldest first. They are updated.
    Raises ValueError if shapes do not fit, or for a block out of range, before anything is written.
    """
    channels, taps = weight.shape
    if x.shape[1] != channels or states.shape[1] != (taps - 1) * channels or not 1 < taps <= MAX_TAPS:
        raise ValueError(f"a convolution of [{channels}, {taps}] fits neither x {list(x.shape)} nor its states")
    weight, bias = weight.to(x.dtype).contiguous(), None if bias is None else bias.to(x.dtype).contiguous()
    if not _is_fast(x, "convolution"):
        return _convolution(x, weight, bias, silu, states, batch)
    x = x if x.stride(1) == 1 else x.contiguous()
    out = x.new_empty(x.shape)
    where = (states, batch.block_table, batch.context_lens, batch.cu_seqlens, batch.block_size)
    torch.ops.looseleaf.convolution(out, x, weight, bias, silu, *where)
    return out


@dataclass(frozen=True, slots=True)
class Recurrence:
    """The inputs of a recurrence over T tokens, for H heads of width P with states [N, P]."""

    values: Tensor  # fp32 [T, H, P]
    keys: Tensor  # fp32 [T, G, N], each for H / G heads
    queries: Tensor  # as keys
    decay: Tensor
    """fp32 [T, H], the factors by which states decay; with `rates`, [T, 1, P]."""
    beta: Tensor | None = None
    """fp32 [T, H]; the value becomes beta * (value - key S), where S is the state after its decay (delta rule)."""
    rates: Tensor | None = None
    """fp32 [1, N, P] for H = 1; each element of S decays by a separate factor exp(decay * rates) (Mamba)."""

    def __post_init__(self) -> None:
        num_tokens, heads, width = self.values.shape
        _, groups, n_state = self.keys.shape
        expected = (num_tokens, heads) if self.rates is None else (num_tokens, 1, width)
        if heads % groups or self.queries.shape != self.keys.shape or self.decay.shape != expected:
            raise ValueError(f"values {list(self.values.shape)} and keys {list(self.keys.shape)} do not fit each other")
        if self.rates is not None and (self.beta is not None or self.rates.shape != (1, n_state, width)):
            raise ValueError(f"rates {list(self.rates.shape)} are for one head, and not for the delta rule")

    @property
    def state_size(self) -> int:
        """Number of values in the state of one sequence."""
        return self.values.shape[1] * self.values.shape[2] * self.keys.shape[2]


def recurrence(inputs: Recurrence, states: Tensor, batch: StateBatch) -> Tensor:
    """Updates S [H, N, P] token by token, S = decay * S + key (x) value, and returns query S [T, H, P].
    `Recurrence` describes how `beta` and `rates` change this.

    states: fp32 [num_blocks, H * N * P], strided. They are updated.
    Raises ValueError if shapes do not fit, or for a block out of range, before anything is written.
    """
    if states.shape[1] != inputs.state_size:
        raise ValueError(f"states of {states.shape[1]} numbers do not fit those of {inputs.state_size}")
    if not _is_fast(inputs.values, "recurrence"):
        return _recurrence(inputs, states, batch)
    arrays = [each.contiguous() for each in (inputs.values, inputs.keys, inputs.queries, inputs.decay)]
    beta = None if inputs.beta is None else inputs.beta.contiguous()
    rates = None if inputs.rates is None else inputs.rates.contiguous() * LOG2_E
    out = torch.empty_like(arrays[0])
    where = (states, batch.block_table, batch.context_lens, batch.cu_seqlens, batch.block_size)
    torch.ops.looseleaf.recurrence(out, *arrays, beta, rates, *where)
    return out


def _is_fast(x: Tensor, name: str) -> bool:
    """Returns whether the C++ kernels support `x`. If not, counts a fallback unless the reference is in use."""
    library = current()
    if library.handle is not None and not on_triton(x) and x.dtype in (torch.bfloat16, torch.float32):
        return True
    if library.isa != "reference":
        count_fallback(name, f"no fast path for {x.dtype} on {x.device.type}")
    return False


def _convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, states: Tensor, batch: StateBatch
) -> Tensor:
    """Computes `convolution` in plain torch, as the reference."""
    channels, taps = weight.shape
    out = torch.empty_like(x)
    past = x.new_zeros((taps - 1, channels), dtype=torch.float32)
    for row, source, target in batch.tokens_within(len(states)):
        if source is not None:
            past = states[source].view(taps - 1, channels) if source >= 0 else torch.zeros_like(past)
        window = torch.cat((past, x[row][None].float()))
        total = (window * weight.T.float()).sum(0) + (0 if bias is None else bias.float())
        out[row] = (F.silu(total) if silu else total).to(x.dtype)
        past = window[1:]
        if target is not None:
            states[target] = past.reshape(-1)
    return out


def _recurrence(inputs: Recurrence, states: Tensor, batch: StateBatch) -> Tensor:
    """Computes `recurrence` in plain torch, as the reference."""
    values, beta, rates = inputs.values, inputs.beta, inputs.rates
    heads, n_state, width = values.shape[1], inputs.keys.shape[2], values.shape[2]
    out, times = torch.empty_like(values), heads // inputs.keys.shape[1]
    state = values.new_zeros((heads, n_state, width))
    for row, source, target in batch.tokens_within(len(states)):
        if source is not None:
            state = states[source].view(heads, n_state, width) if source >= 0 else torch.zeros_like(state)
        key, query = (each[row].repeat_interleave(times, 0)[:, :, None] for each in (inputs.keys, inputs.queries))
        decay = inputs.decay[row]
        state = state * (decay[:, None, None] if rates is None else torch.exp(decay[:, None] * rates))
        value = values[row][:, None]  # [H, 1, P]
        if beta is not None:
            value = beta[row][:, None, None] * (value - (key * state).sum(1, keepdim=True))
        state = state + key * value
        out[row] = (query * state).sum(1)
        if target is not None:
            states[target] = state.reshape(-1)
    return out
