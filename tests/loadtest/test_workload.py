"""Workloads: the same requests for the same seed and number, the requested distribution of lengths, traces."""

from __future__ import annotations

import math
import random
import statistics
from pathlib import Path

import pytest

from common.errors import StartupError
from loadtest.workload import AZURE_TRACE, Lengths, Workload
from looseleaf.simulation.trace import read_lengths

BASE = Workload(seed=7, vocab_size=512, max_model_len=2048)


def test_a_request_depends_on_seed_and_number_only() -> None:
    again = Workload(seed=7, vocab_size=512, max_model_len=2048)
    assert [BASE.request(i) for i in (5, 0, 3)] == [again.request(i) for i in (5, 0, 3)]
    assert BASE.request(0) != BASE.request(1)
    assert BASE.request(0) != Workload(seed=8, vocab_size=512, max_model_len=2048).request(0)


def test_lengths_are_lognormal_around_the_median_and_bounded() -> None:
    workload = Workload(seed=1, vocab_size=512, max_model_len=4096, prompt=Lengths(100.0, 0.5, 400), shared_share=0.0)
    lengths = [len(workload.request(i).prompt_ids) for i in range(2000)]
    logs = [math.log(length) for length in lengths]
    assert abs(statistics.median(lengths) - 100) < 5
    assert abs(statistics.stdev(logs) - 0.5) < 0.05
    assert min(lengths) >= 1 and max(lengths) <= 400


def test_every_request_fits_the_model() -> None:
    small = Workload(seed=2, vocab_size=300, max_model_len=64, prompt=Lengths(500.0, 1.0, 5000))
    for number in range(500):
        request = small.request(number)
        assert len(request.prompt_ids) >= 1 and request.max_tokens >= 1
        assert len(request.prompt_ids) + request.max_tokens <= 64
        assert all(16 <= token < 300 for token in request.prompt_ids)


def test_a_share_of_prompts_begins_with_one_of_a_few_prefixes() -> None:
    workload = Workload(seed=3, vocab_size=512, max_model_len=4096, prompt=Lengths(200.0, 0.1, 400), num_prefixes=3)
    heads = [workload.request(i).prompt_ids[:64] for i in range(400)]
    common = {head for head in heads if heads.count(head) > 1}
    assert len(common) == 3
    assert 0.4 < sum(head in common for head in heads) / 400 < 0.6


def test_a_trace_has_lengths(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    header = "# licence\nTIMESTAMP,ContextTokens,GeneratedTokens\n"
    path.write_text(f"{header}2023-11-16 18:15:48,32,1\n2023-11-16 18:15:46,374,44\n")
    assert read_lengths(path, divisor=2.0) == ((187, 22), (16, 1))


def test_the_trace_that_ships_is_whole() -> None:
    trace = read_lengths(AZURE_TRACE)
    assert len(trace) == 1000
    assert trace[:2] == ((374, 44), (396, 109))


def test_a_length_in_a_trace_that_is_no_number_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,nan,44\n")
    with pytest.raises(StartupError, match=r"line 2: ContextTokens must be at least 1, got 'nan'"):
        read_lengths(path)


@pytest.mark.parametrize("mean,most", [(19.31, 100), (338.0, 560), (161.0, 4096)])
def test_lengths_of_a_mean_have_it_although_they_are_cut(mean: float, most: int) -> None:
    lengths = Lengths.of_mean(mean, 0.8, most)
    rng = random.Random(1)
    drawn = [lengths.draw(rng) for _ in range(20_000)]
    assert abs(statistics.fmean(drawn) / mean - 1) < 0.02
    assert max(drawn) <= most


def test_lengths_that_cannot_have_a_mean_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 100"):
        Lengths.of_mean(338.0, 0.8, 100)
