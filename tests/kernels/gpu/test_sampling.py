"""Sampling in Triton: the tokens of the CPU kernels, ties, several tiles, poison, independent rows.
tests/kernels/test_sampling.py compares the CPU kernels with exact distributions. These tests use the CPU build that
rounds like the device: a GPU uses fused multiply-add; triton's interpreter and the portable build do not.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels import cpu
from kernels import sampling as on_cpu
from kernels.gpu.sampling import log_softmax_top, sample, tile_for

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy: inf - inf
NEG_INF = float("-inf")
Rows = list[tuple[float, int, float, float, int, int, int]]
"""The parameters of each row: temperature, top_k, top_p, min_p, seed, sample, position."""


def _sample(logits: Tensor, rows: Rows) -> list[int]:
    return sample(logits, *map(list, zip(*rows, strict=True))).tolist()


def _draw(logits: Tensor, heat: float = 1.0, k: int = 0, p: float = 1.0, floor: float = 0.0) -> list[int]:
    """Samples all rows of `logits` with the same parameters. A row's number is its position."""
    return _sample(logits, [(heat, k, p, floor, 0, 0, i) for i in range(len(logits))])


def _build(device: str) -> cpu.Isa:
    """Returns the name of the CPU build that rounds like the device."""
    return next(isa for isa in cpu.supported_isas() if device == "cuda" or isa == "portable")


def _as_the_cpu(logits: Tensor, rows: Rows) -> list[int]:
    with cpu.using(_build(logits.device.type)):
        return on_cpu.sample(logits.cpu(), *map(list, zip(*rows, strict=True))).tolist()


def _random(rows: int, vocab: int, device: str, spread: float = 3.0) -> Tensor:
    return (spread * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab))).to(device)


@pytest.mark.parametrize("vocab", [1, 7, 1000, 20_000])
def test_equal_weights_show_the_uniform_number(device: str, vocab: int) -> None:
    """With equal logits, the token is floor(u * vocab). This checks Philox, its counter and its key."""
    inputs = [(0, 0, 0), (1, 3, 2**40), (2**63 + 5, 2**33, 17), (2**64 - 1, 1, 9)]
    got = _sample(torch.zeros(4, vocab, device=device), [(1.0, 0, 1.0, 0.0, *row) for row in inputs])
    assert got == [int(on_cpu.uniform(*row) * vocab) for row in inputs]


@pytest.mark.parametrize("vocab", [33, 500, 5000])
def test_takes_the_cpus_token(device: str, vocab: int) -> None:
    g, n = torch.Generator().manual_seed(1), 12 if vocab == 5000 else 24
    logits = _random(n, vocab, device)
    logits[:, ::7] = logits[:, ::7].round()  # many ties
    logits[3, 5:], logits[4, :9] = NEG_INF, NEG_INF
    logits[5] *= 100  # only a few weights are not 0
    logits[6] = logits[6] * 1e-3 + 1e4  # adjacent keys
    heat = [round(float(h), 3) for h in torch.rand(n, generator=g) + 0.1]
    ks = torch.randint(0, 60, (n,), generator=g).tolist()
    ps = [1.0 if i % 4 == 0 else round(float(p), 3) for i, p in enumerate(torch.rand(n, generator=g) * 0.9 + 0.1)]
    rows = [(heat[i], ks[i] if i % 3 else 0, ps[i], 0.05 * (i % 5 == 1), 2**63 + 7 * i, i % 4, i) for i in range(n)]
    assert _sample(logits, rows) == _as_the_cpu(logits, rows)


def test_a_row_does_not_depend_on_the_batch(device: str) -> None:
    settings = [(0.0, 0, 1.0, 0.0), (0.5, 3, 0.9, 0.1), (1.0, 0, 1.0, 0.0), (1.0, 50, 0.5, 0.0), (0.7, 0, 0.3, 1.0)]
    rows = [(*s, 2**64 - 1 - i, i, 10**6) for i, s in enumerate(settings)]
    logits = _random(5, 700, device)
    together = _sample(logits, rows)
    for i in range(5):
        assert _sample(logits[i : i + 1], rows[i : i + 1]) == together[i : i + 1]
    wide = torch.full((5, 800), math.nan, device=device)
    wide[:, 50:750] = logits  # strided rows next to poison
    assert _sample(wide[:, 50:750], rows) == together


def test_greedy_takes_the_lowest_of_equals(device: str) -> None:
    logits = _random(6, 5000, device).clamp(max=1.0)
    logits[0, [40, 4700]], logits[1, [16, 99]], logits[2, 0], logits[3, [4097, 4100]] = 5.0, 5.0, 5.0, 5.0
    logits[4], logits[5] = NEG_INF, -1.0
    logits[5, [10, 11]] = torch.tensor([-0.0, 0.0], device=device)
    assert _draw(logits, heat=0.0) == [40, 16, 0, 4097, 0, 10]


def test_nothing_or_one_certainty_to_draw_from(device: str) -> None:
    logits = _random(3, 50, device)
    logits[0], logits[1, [7, 9]], logits[2, 3] = NEG_INF, math.inf, math.nan
    got = _draw(logits, k=5, p=0.9)
    assert got[:2] == [0, 7] and got[2] != 3


@pytest.mark.parametrize("k", [1, 2, 3])
def test_top_k_breaks_ties_by_id(device: str, k: int) -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0, -1.0]], device=device).repeat(16, 1)
    assert set(_draw(logits, k=k)) == set(range(1, 1 + k))
    assert set(_draw(logits, k=k, p=0.999)) == set(range(1, 1 + k))  # needs exactly the tokens that top_k keeps


def test_ties_across_tiles(device: str) -> None:
    """Of 200 equal tokens around the end of the first tile, top_k and top_p keep those with the lowest ids."""
    vocab = tile_for(10_000) + 100
    logits = torch.full((4, vocab), -50.0, device=device)
    logits[:, vocab - 200 :] = 1.0
    for k, p, kept in ((150, 1.0, 150), (0, 0.25, 50), (160, 0.5, 80)):
        rows = [(1.0, k, p, 0.0, 1, 0, i) for i in range(4)]
        got = _sample(logits, rows)
        assert got == _as_the_cpu(logits, rows)
        assert all(vocab - 200 <= token < vocab - 200 + kept for token in got)
    assert max(_draw(logits, k=120)) >= vocab - 100  # some tokens are in the second tile


def test_top_p_breaks_ties_by_id_and_keeps_one(device: str) -> None:
    assert set(_draw(torch.zeros(16, 4, device=device), p=0.5)) == {0, 1}
    for small in (1e-6, 5e-324):  # the latter is 0 in fp32
        assert set(_draw(torch.zeros(4, 4, device=device), p=small)) == {0}


def test_min_p_of_one_keeps_the_likeliest(device: str) -> None:
    assert set(_draw(torch.tensor([[0.0, 3.0, 2.9]], device=device).repeat(8, 1), floor=1.0)) == {1}


def test_banned_tokens_are_never_drawn(device: str) -> None:
    logits = torch.full((10, 50), NEG_INF, device=device)
    logits[:, 31] = -4.0
    assert set(_draw(logits)) == set(_draw(logits, k=3, p=0.9)) == {31}


def test_no_rows(device: str) -> None:
    assert sample(torch.empty(0, 9, device=device), *([[]] * 7)).shape == (0,)


@pytest.mark.parametrize("vocab", [1, 16, 77, 5000])
def test_log_softmax_top(device: str, vocab: int) -> None:
    logits = _random(3, vocab, device)
    logits[:, vocab // 2 :] = logits[:, : vocab - vocab // 2].clone()  # every logit occurs twice, as a tie
    ids, k = torch.tensor([0, vocab // 2, vocab - 1], device=device), min(6, vocab)
    got = log_softmax_top(logits, ids, k)
    want = torch.log_softmax(logits.double(), -1)
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :k]
    chosen = logits.gather(1, ids[:, None])
    assert torch.allclose(got.chosen.double(), want.gather(1, ids[:, None])[:, 0], atol=1e-6)
    assert torch.equal(got.rank, (logits > chosen).sum(1) + 1)
    assert torch.equal(got.top_ids, order) and torch.allclose(got.top.double(), want.gather(1, order), atol=1e-6)
    alone = log_softmax_top(logits[2:], ids[2:], k)
    assert torch.equal(alone.top[0], got.top[2]) and torch.equal(alone.chosen[0], got.chosen[2])
    assert log_softmax_top(logits, ids, 0).top_ids.shape == (3, 0)
    outside = log_softmax_top(logits, torch.tensor([-1, vocab, 0], device=device), 1)
    assert outside.chosen.isnan().tolist() == [True, True, False]


def test_log_probabilities_have_the_cpus_bits(device: str) -> None:
    """The two logits differ by up to 12. Equal results require equal bits of 2^x."""
    logits = torch.stack((torch.zeros(24), torch.linspace(-12, 0, 24).sin() * 6 - 6), 1).to(device)
    ids = torch.arange(24, device=device) % 2
    got = log_softmax_top(logits, ids, 2)
    with cpu.using(_build(device)):
        want = on_cpu.log_softmax_top(logits.cpu(), ids.cpu(), 2)
    assert torch.equal(got.chosen.cpu(), want.chosen) and torch.equal(got.top.cpu(), want.top)
