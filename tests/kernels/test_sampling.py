"""Sampling: known answers of Philox, the exact distribution, filters, independent rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.sampling import log_softmax_top, philox_4x32_10, sample, sample_reference, uniform

NEG_INF = float("-inf")


def draw(logits: torch.Tensor, heat: float = 1.0, k: int = 0, p: float = 1.0, floor: float = 0.0, seed: int = 0) -> torch.Tensor:  # fmt: skip  # noqa: E501
    """Samples all rows of `logits` with the same parameters. A row's number is its position."""
    n = len(logits)
    return sample(logits, [heat] * n, [k] * n, [p] * n, [floor] * n, [seed] * n, [0] * n, list(range(n)))


def test_philox_known_answers() -> None:
    """The values are from kat_vectors of Random123."""
    ones = 0xFFFFFFFF
    assert philox_4x32_10((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox_4x32_10((ones,) * 4, (ones,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox_4x32_10(pi, (0xA4093822, 0x299F31D0)) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


@pytest.mark.parametrize("vocab", [1, 7, 1000])
def test_equal_weights_show_the_uniform_number(isa: str, vocab: int) -> None:
    """With equal logits, the token is floor(u * vocab). This compares Philox, its counter and its key in C++ with those
    in Python.
    """
    seeds, samples = [0, 1, 2**63 + 5, 2**64 - 1], [0, 3, 2**33, 1]
    positions = [0, 2**40, 17, 9]
    got = sample(torch.zeros(4, vocab), [1.0] * 4, [0] * 4, [1.0] * 4, [0.0] * 4, seeds, samples, positions)
    want = [int(uniform(*x) * vocab) for x in zip(seeds, samples, positions, strict=True)]
    assert got.tolist() == want


@pytest.mark.parametrize(
    ("heat", "k", "p", "floor"),
    [
        (1.0, 0, 1.0, 0.0), (0.5, 0, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (1.0, 0, 0.8, 0.0), (1.5, 0, 1.0, 0.2),
        (0.9, 6, 0.9, 0.05),
    ],
)  # fmt: skip
def test_chi_square(native_isa: str, heat: float, k: int, p: float, floor: float) -> None:
    """Compares 100,000 samples with the exact distribution. A correct sampler fails for one seed in ten thousand."""
    n, logits = 100_000, torch.tensor([0.3, 2.0, -1.0, 1.1, NEG_INF, 0.9, 1.1, -3.0, 0.0, 1.7])
    probability = torch.softmax(logits.double() / heat, -1)
    probability[probability < floor * probability.max()] = 0
    order = torch.sort(probability, descending=True, stable=True).indices
    if k:
        probability[order[k:]] = 0
    probability /= probability.sum()
    before = probability[order].cumsum(0) - probability[order]
    probability[order[before >= p]] = 0
    probability /= probability.sum()
    seen = torch.bincount(draw(logits.expand(n, -1), heat, k, p, floor, seed=11), minlength=10)
    assert (seen[probability == 0] == 0).all()
    kept = probability > 0
    want = probability[kept] * n
    chi_square = ((seen[kept] - want) ** 2 / want).sum()
    freedom = torch.tensor((int(kept.sum()) - 1) / 2, dtype=torch.float64)
    assert torch.special.gammaincc(freedom, chi_square / 2) > 1e-4


@pytest.mark.parametrize(("vocab", "most_k"), [(300, 40), (5000, 40), (5000, 5000)])
def test_agrees_with_the_reference(native_isa: str, vocab: int, most_k: int) -> None:
    n, g = 400, torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(n, vocab, generator=g)
    columns = (
        torch.rand(n, generator=g) + 0.1,
        torch.randint(0, most_k, (n,), generator=g),
        torch.rand(n, generator=g) * 0.9 + 0.1,
        torch.rand(n, generator=g) * 0.1,
        torch.randint(0, 2**62, (n,), generator=g),
        torch.arange(n) % 4,
        torch.arange(n),
    )
    assert (sample(logits, *columns) == sample_reference(logits, *columns)).float().mean() > 0.99


@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_row_does_not_depend_on_the_batch(native_isa: str, data: st.DataObject) -> None:
    n, vocab = data.draw(st.integers(1, 6)), data.draw(st.sampled_from([1, 15, 16, 33, 500, 32_000]))
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    logits = torch.randn(n, vocab, generator=g)
    rows = [
        data.draw(st.tuples(
            st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([-1, 1, 3, 50]), st.sampled_from([0.1, 0.9, 1.0]),
            st.sampled_from([0.0, 0.1, 1.0]), st.integers(0, 2**64 - 1), st.integers(0, 8), st.integers(0, 10**6),
        ))
        for _ in range(n)
    ]  # fmt: skip
    together = sample(logits, *map(list, zip(*rows, strict=True)))
    torch.set_num_threads(data.draw(st.integers(1, 2)))
    for i, row in enumerate(rows):
        assert sample(logits[i : i + 1], *([x] for x in row)).item() == together[i].item()


def test_greedy_takes_the_lowest_of_equals(isa: str) -> None:
    logits = torch.randn(3, 100).clamp(max=1.0)
    logits[0, [40, 70]], logits[1, [16, 99]], logits[2, 0] = 5.0, 5.0, 5.0
    assert draw(logits, heat=0.0).tolist() == [40, 16, 0]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_top_k_breaks_ties_by_id(isa: str, k: int) -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0, -1.0]]).repeat(300, 1)
    assert set(draw(logits, k=k).tolist()) == set(range(1, 1 + k))


def test_top_p_breaks_ties_by_id_and_keeps_one(isa: str) -> None:
    assert set(draw(torch.zeros(300, 4), p=0.5).tolist()) == {0, 1}
    for small in (1e-6, 5e-324):  # the latter is 0 in fp32
        assert set(draw(torch.tensor([[0.0, 1.0, 1.0, 0.5]]).repeat(300, 1), p=small).tolist()) == {1}


def test_min_p_of_one_keeps_the_likeliest(isa: str) -> None:
    assert set(draw(torch.tensor([[0.0, 3.0, 2.9]]).repeat(50, 1), floor=1.0).tolist()) == {1}


def test_banned_tokens_are_never_drawn(isa: str) -> None:
    logits = torch.full((100, 50), NEG_INF)
    logits[:, 31] = -4.0
    assert set(draw(logits).tolist()) == set(draw(logits, k=3, p=0.9).tolist()) == {31}


@pytest.mark.parametrize("vocab", [1, 16, 77, 5000])
def test_log_softmax_top(isa: str, vocab: int) -> None:
    logits = 4 * torch.randn(5, vocab)
    logits[:, vocab // 2 :] = logits[:, : vocab - vocab // 2].clone()  # every logit occurs twice, as a tie
    ids, k = torch.randint(0, vocab, (5,)), min(6, vocab)
    got = log_softmax_top(logits, ids, k)
    want = torch.log_softmax(logits.double(), -1)
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :k]
    chosen = logits.gather(1, ids[:, None])
    assert torch.allclose(got.chosen.double(), want.gather(1, ids[:, None])[:, 0], atol=1e-5)
    assert torch.equal(got.rank, (logits > chosen).sum(1) + 1)
    assert torch.equal(got.top_ids, order) and torch.allclose(got.top.double(), want.gather(1, order), atol=1e-5)
    alone = log_softmax_top(logits[3:4], ids[3:4], k)
    assert torch.equal(alone.top[0], got.top[3]) and torch.equal(alone.chosen[0], got.chosen[3])
    assert log_softmax_top(logits, ids, 0).top_ids.shape == (5, 0)


def test_refuses_what_does_not_fit(isa: str) -> None:
    with pytest.raises(ValueError, match="fp32"):
        draw(torch.zeros(2, 3).bfloat16())
    with pytest.raises(ValueError, match="k <= V"):
        log_softmax_top(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), 4)
