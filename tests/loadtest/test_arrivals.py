"""What is sent and when: times of traces, Poisson arrivals, shapes, and prompts that fit the model."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.arrivals import Plan, Shape
from loadtest.settings import LoadSettings


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    rows = [
        {"timestamp": 1000, "input_length": 96, "output_length": 4, "hash_ids": [7, 8], "hash_block_size": 64},
        {"timestamp": 3000, "input_length": 128, "output_length": 60, "hash_ids": [7, 9], "hash_block_size": 64},
        {"timestamp": 2000, "input_length": 40, "output_length": 8, "hash_ids": [3], "hash_block_size": 64},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    "pace,times", [({}, [0.0, 1.0, 2.0]), ({"speed": 4}, [0.0, 0.25, 0.5]), ({"rate": 10}, [0.0, 0.1, 0.2])]
)
def test_a_trace_has_its_own_times_or_a_pace(mooncake: Path, pace: dict[str, Any], times: list[float]) -> None:
    plan = Plan(LoadSettings(trace=mooncake, **pace))
    assert list(plan.arrivals()) == pytest.approx(times)
    assert plan.num_requests == 3


def test_prompts_of_a_trace_share_prefixes_and_fit_the_model(mooncake: Path) -> None:
    work = Plan(LoadSettings(trace=mooncake)).work(vocab_size=512, max_model_len=100)
    first, middle, last = (work.request(number) for number in range(3))
    assert [len(request.prompt_ids) for request, _ in (first, middle, last)] == [96, 40, 50]
    assert [request.max_tokens for request, _ in (first, middle, last)] == [4, 8, 50]
    assert [cut for _, cut in (first, middle, last)] == [False, False, True]
    assert first[0].prompt_ids[:50] == last[0].prompt_ids
    assert first[0].prompt_ids[:40] != middle[0].prompt_ids


def test_arrivals_are_the_same_in_every_process_and_have_the_rate() -> None:
    settings = LoadSettings(rate=50, requests=4000, seed=3)
    times = list(Plan(settings).arrivals())
    assert times == list(Plan(settings).arrivals()) != list(Plan(LoadSettings(rate=50, requests=4000)).arrivals())
    assert len(times) == 4000 and times == sorted(times)
    assert times[-1] == pytest.approx(80, rel=0.1)


def test_steps_rise_to_the_peak_and_end() -> None:
    plan = Plan(LoadSettings(rate=100, shape="steps", shape_peak=4, shape_steps=4, shape_period=10))
    times = list(plan.arrivals())
    counts = [sum(at // 10 == step for at in times) for step in range(4)]
    assert counts == pytest.approx([1000, 2000, 3000, 4000], rel=0.1)
    assert max(times) < 40 and plan.num_requests == len(times)


@pytest.mark.parametrize("kind,at_s,factor", [
    ("spikes", 0.0, 1.0), ("spikes", 49.9, 1.0), ("spikes", 50.0, 4.0), ("spikes", 60.0, 1.0), ("spikes", 110.0, 4.0),
    ("diurnal", 0.0, 1.0), ("diurnal", 15.0, 2.5), ("diurnal", 30.0, 4.0), ("diurnal", 60.0, 1.0),
    ("steps", 59.9, 1.0), ("steps", 60.0, 2.0), ("steps", 239.9, 4.0), ("steps", 240.0, None), (None, 1e6, 1.0),
])  # fmt: skip
def test_shapes(kind: str | None, at_s: float, factor: float | None) -> None:
    assert Shape(kind, 4.0, 60.0, 4, 10.0).factor(at_s) == (factor if factor is None else pytest.approx(factor))


def test_without_an_end_there_is_no_number_of_requests() -> None:
    plan = Plan(LoadSettings(rate=5, shape="spikes"))
    assert plan.num_requests is None
    assert len(list(itertools.islice(plan.arrivals(), 1000))) == 1000
    assert Plan(LoadSettings()).num_requests is None


@pytest.mark.parametrize("flags,names", [
    (["--rate", "0"], ["--rate", "greater than 0"]), (["--speed", "2"], ["--speed", "--trace"]),
    (["--divide", "2"], ["--divide", "--trace"]), (["--requests", "5"], ["--requests", "--rate"]),
    (["--trace", "x", "--rate", "1", "--speed", "2"], ["--speed", "excludes --rate"]),
    (["--trace", "x", "--shape", "steps"], ["--shape", "excludes --trace"]),
    (["--shape", "square"], ["--shape", "'steps', 'spikes' or 'diurnal'"]),
    (["--shape", "spikes", "--shape-period", "5"], ["--shape-width", "less than --shape-period"]),
    (["--slo-share", "90"], ["--slo-share", "less than or equal to 1"]), (["--slo-ttft", "0"], ["--slo-ttft"]),
])  # fmt: skip
def test_a_wrong_flag_gets_one_line(flags: list[str], names: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        LoadSettings.load(flags)
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and all(name in line for name in names), line


def test_only_changed_flags_are_passed_to_locust(mooncake: Path) -> None:
    settings = LoadSettings(trace=mooncake, divide=2, users=3, html="x.html", slo_ttft=0.5)
    assert settings.flags() == ["--trace", str(mooncake), "--divide", "2.0", "--slo-ttft", "0.5"]
