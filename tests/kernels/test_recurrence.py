"""Convolution and recurrence over blocks, compared with float64 without blocks, in every build and with any chunks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.selection import fallbacks
from kernels.recurrence import Recurrence, StateBatch, convolution, recurrence

NUM_TOKENS, BLOCK_SIZE, TAPS = 23, 4, 4
NUM_BLOCKS = -(-NUM_TOKENS // BLOCK_SIZE)
CUTS = ((NUM_TOKENS,), (1,) * NUM_TOKENS, (5, 4, 7, 1, 6), (8, 8, 7))
Kind = str
KINDS: tuple[Kind, ...] = ("scalar", "delta", "rates")


@dataclass
class Inputs:
    """The inputs of one sequence for a recurrence."""

    values: Tensor
    keys: Tensor
    queries: Tensor
    decay: Tensor
    beta: Tensor | None = None
    rates: Tensor | None = None

    @property
    def state_size(self) -> int:
        return self.values.shape[1] * self.keys.shape[2] * self.values.shape[2]

    def run(self, states: Tensor, batch: StateBatch, rows: slice = slice(None), repeat: int = 1) -> Tensor:
        def of(x: Tensor) -> Tensor:
            return torch.cat([x[rows]] * repeat)

        beta = None if self.beta is None else of(self.beta)
        inputs = map(of, (self.values, self.keys, self.queries, self.decay))
        return recurrence(Recurrence(*inputs, beta, self.rates), states, batch)


def inputs(kind: Kind, width: int = 40, n_state: int = 5) -> Inputs:
    heads, groups = (1, 1) if kind == "rates" else (4, 2)
    keys, queries = (F.normalize(torch.randn(NUM_TOKENS, groups, n_state), dim=-1) for _ in range(2))
    values = torch.randn(NUM_TOKENS, heads, width)
    if kind == "rates":
        return Inputs(values, keys, queries, torch.rand(values.shape), rates=-3 * torch.rand(1, n_state, width))
    decay = 0.5 + torch.rand(NUM_TOKENS, heads) / 2
    return Inputs(values, keys, queries, decay, torch.rand(NUM_TOKENS, heads) if kind == "delta" else None)


def batches(cut: Sequence[int], num_seqs: int = 1) -> list[tuple[slice, StateBatch]]:
    """Returns the steps of `num_seqs` sequences of the same length. Each has its own blocks, in a different order."""
    order = torch.randperm(num_seqs * NUM_BLOCKS, generator=torch.Generator().manual_seed(1)).int()
    table, steps = order.view(num_seqs, NUM_BLOCKS), []
    for end, count in zip(itertools.accumulate(cut), cut, strict=True):
        starts = torch.arange(num_seqs + 1, dtype=torch.int32) * count
        lens = torch.full((num_seqs,), end, dtype=torch.int32)
        steps.append((slice(end - count, end), StateBatch(table, lens, starts, BLOCK_SIZE)))
    return steps


def expected(given: Inputs) -> tuple[Tensor, list[Tensor]]:
    """Returns the answers [T, H, P] and the state after each token, in float64."""
    times = given.values.shape[1] // given.keys.shape[1]
    keys, queries = (x.double().repeat_interleave(times, 1) for x in (given.keys, given.queries))
    state = torch.zeros(given.values.shape[1], given.keys.shape[2], given.values.shape[2], dtype=torch.float64)
    out, states = [], []
    for t, value in enumerate(given.values.double()):
        decay = given.decay[t].double()
        if given.rates is None:
            state = state * decay[:, None, None]
        else:
            state = state * (decay[:, None] * given.rates.double()).exp()
        if given.beta is not None:
            value = given.beta[t].double()[:, None] * (value - (keys[t][:, :, None] * state).sum(1))
        state = state + keys[t][:, :, None] * value[:, None]
        out.append((queries[t][:, :, None] * state).sum(1))
        states.append(state)
    return torch.stack(out), states


def arena(width: int, num_seqs: int = 1) -> Tensor:
    """Returns states inside wider blocks that are filled with NaN, so that a read of unwritten memory is detected."""
    return torch.full((num_seqs * NUM_BLOCKS, width + 3), float("nan"))[:, 1 : width + 1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 8, 40, 70])
def test_a_recurrence_matches_float64_and_leaves_its_state_in_each_block(isa: str, kind: Kind, width: int) -> None:
    given = inputs(kind, width)
    out, after = expected(given)
    states = arena(given.state_size)
    [(_, batch)] = batches((NUM_TOKENS,))
    got = given.run(states, batch)
    assert torch.allclose(got.double(), out, rtol=1e-5, atol=1e-5)
    for index, block in enumerate(batch.block_table[0].tolist()):
        last = min((index + 1) * BLOCK_SIZE, NUM_TOKENS) - 1
        assert torch.allclose(states[block].double(), after[last].flatten(), rtol=1e-5, atol=1e-5)
    assert "recurrence" not in fallbacks()


@pytest.mark.parametrize("kind", KINDS)
def test_a_recurrence_has_the_same_bits_however_it_is_cut(isa: str, kind: Kind) -> None:
    given, found = inputs(kind), []
    for cut, num_seqs in itertools.product(CUTS, (1, 3)):
        states = arena(given.state_size, num_seqs)
        parts = [given.run(states, batch, rows, num_seqs) for rows, batch in batches(cut, num_seqs)]
        for index in range(num_seqs):
            each = torch.cat([part.view(num_seqs, -1, *part.shape[1:])[index] for part in parts])
            table = batches(cut, num_seqs)[0][1].block_table[index].tolist()
            found.append((each, states[table]))
    for each, left in found:
        assert torch.equal(each, found[0][0]) and torch.equal(left, found[0][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("channels", "silu", "has_bias"), [(1, True, True), (70, False, False), (33, True, True)])
def test_a_convolution_matches_float64_however_it_is_cut(
    isa: str, dtype: torch.dtype, channels: int, silu: bool, has_bias: bool
) -> None:
    x = torch.randn(NUM_TOKENS, channels + 2).to(dtype)[:, 1 : channels + 1]
    weight, bias = torch.randn(channels, TAPS).to(dtype), torch.randn(channels).to(dtype) if has_bias else None
    padded = F.pad(x.double().T[None], (TAPS - 1, 0))
    want = F.conv1d(padded, weight.double()[:, None], None if bias is None else bias.double(), groups=channels)[0].T
    want = F.silu(want) if silu else want
    first = None
    for cut in CUTS:
        states = arena((TAPS - 1) * channels)
        got = torch.cat([convolution(x[rows], weight, bias, silu, states, batch) for rows, batch in batches(cut)])
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        assert torch.allclose(got.double(), want, rtol=tolerance, atol=tolerance)
        last = states[batches(cut)[0][1].block_table[0, -1].item()]
        assert torch.equal(last.view(TAPS - 1, channels), x[-TAPS + 1 :].float())
        first = got if first is None else first
        assert torch.equal(got, first)


def test_a_branch_continues_what_the_same_step_has_stored(isa: str) -> None:
    """A second sequence continues from the first block of the first sequence, which the same step computes."""
    given = inputs("scalar")
    rows = torch.cat((torch.arange(8), torch.arange(4, 9)))
    both = Inputs(*(x[rows] for x in (given.values, given.keys, given.queries, given.decay)))
    table = torch.tensor([[3, 0, 0], [3, 1, 2]], dtype=torch.int32)
    batch = StateBatch(table, torch.tensor([8, 9], dtype=torch.int32), torch.tensor([0, 8, 13], dtype=torch.int32), 4)
    out, _ = expected(given)
    got = both.run(arena(given.state_size), batch)
    assert torch.allclose(got.double(), torch.cat((out[:8], out[4:9])), rtol=1e-5, atol=1e-5)


def test_bad_arguments_are_refused_before_anything_is_written(isa: str) -> None:
    given = inputs("scalar")
    states = arena(given.state_size)
    [(_, batch)] = batches((NUM_TOKENS,))
    with pytest.raises(ValueError, match="do not fit"):
        given.run(states[:, 1:], batch)
    with pytest.raises(ValueError, match="one head"):
        Recurrence(
            given.values[:, :1], given.keys[:, :1], given.queries[:, :1], given.values[:, :1], rates=torch.ones(3)
        )
    with pytest.raises(ValueError, match="do not fit each other"):
        Recurrence(given.values, given.keys, given.queries, given.values)
    with pytest.raises(ValueError, match="fits neither"):
        convolution(torch.randn(23, 5), torch.randn(5, 1), None, True, arena(0), batch)
    table = batch.block_table.clone()
    table[0, 2] = NUM_BLOCKS
    with pytest.raises(ValueError, match="out of range"):
        given.run(states, StateBatch(table, batch.context_lens, batch.cu_seqlens, BLOCK_SIZE))
    with pytest.raises(ValueError, match="too short"):
        given.run(states, StateBatch(batch.block_table[:, :3], batch.context_lens, batch.cu_seqlens, BLOCK_SIZE))
    with pytest.raises(ValueError, match="longer than its context"):
        given.run(states, StateBatch(batch.block_table, batch.context_lens - 1, batch.cu_seqlens, BLOCK_SIZE))
    assert states.isnan().all()
