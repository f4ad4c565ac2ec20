"""Measurements of single requests: how a fit makes them of arrivals, and how a simulation uses them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import StartupError
from looseleaf.simulation.costs import Costs, Start, load, median
from looseleaf.simulation.draws import IDLE_S, Draws, Presence
from looseleaf.simulation.fleet import FleetOptions, simulate
from looseleaf.simulation.replay import _Beside, _Probe
from looseleaf.simulation.trace import TraceRequest
from looseleaf.simulation.worker import WorkerOptions

COSTS = Costs("model", 4096, ((16.0, 0.010), (512.0, 0.110)), 0.0, ((1.0, 0.010),), 0.0, 0.004, 0.003)


def test_starts_of_the_nearest_length_are_used_in_turn() -> None:
    short, long = [Start(16, 0.1, 0.01 * n, 0.0) for n in (1, 2)], Start(512, 0.2, 0.05, 0.0)
    draws = Draws(replace(COSTS, idle=(short[0], long, short[1])))
    assert [draws.start("idle", length) for length in (20, 400, 1, 100)] == [short[0], long, short[1], short[0]]
    assert draws.start("warm", 20).front_s == draws.start("beside", 20).front_s == COSTS.front_s, "the medians"


def test_tokens_are_late_but_stay_in_order() -> None:
    draws = Draws(replace(COSTS, late_s=(0.03, -0.005)))
    assert draws.delivered([1.0, 2.0, 2.01, 2.02, 2.06]) == pytest.approx([1.0, 2.0, 2.04, 2.04, 2.09])
    assert Draws(COSTS).delivered([1.0, 2.0, 2.5]) == (1.0, 2.0, 2.5)


def test_presence_tells_how_a_request_starts() -> None:
    now = [0.0]
    presence, kinds = Presence(lambda: now[0]), []
    for at_s, stays in ((0.0, False), (IDLE_S / 2, False), (2 * IDLE_S, True)):
        now[0] = at_s
        with presence.enter() as kind:
            kinds.append(kind)
            if stays:
                with presence.enter() as other:
                    kinds.append(other)
    assert kinds == ["idle", "warm", "idle", "beside"]


def test_a_probe_measures_a_start_and_how_late_tokens_are() -> None:
    probe = _Probe([1.0, 1.05, 1.08, 1.09, 1.11, 1.11, 1.13], 0.04)
    start = probe.start(64, 0.01)
    assert (start.num_tokens, start.prefill_s) == (64, 0.04)
    assert (start.front_s, start.hand_over_s) == (pytest.approx(0.01), pytest.approx(0.02))
    late_s = probe.late_s()
    assert sum(late_s) == pytest.approx(0.0) and late_s[1] > 0 > late_s[2], "the second of two that came at once"


def test_a_request_beside_another_measures_the_change_of_turns() -> None:
    beside = _Beside(64, prefill_s=0.04, first_s=0.07, step_s=0.01, gap_s=0.056)
    assert beside.lost_s == pytest.approx(0.006)
    assert beside.start_of(0.003).front_s == pytest.approx(0.07 - 0.04 - 0.005 - 0.003)


def test_a_change_of_turns_takes_time_only_between_workers_of_the_same_cores() -> None:
    trace = [TraceRequest(0.0, ((1, 16),), 3)]
    costs = replace(COSTS, turn_s=0.002)
    options = FleetOptions(turns=True, workers=WorkerOptions())
    [shared], [apart] = (simulate(trace, costs, o) for o in (options, replace(options, turns=False)))
    assert shared.gaps_s == pytest.approx([0.003 + 0.002 + 0.010, 0.010])
    assert apart.gaps_s == pytest.approx([0.003 + 0.010, 0.010])


def test_a_request_beside_another_has_the_front_of_such_requests() -> None:
    costs = replace(COSTS, warm=(Start(16, 0.01, 0.004, 0.003),), beside=(Start(16, 0.01, 0.050, 0.0),))
    trace = [TraceRequest(0.0, ((1, 16),), 40), TraceRequest(0.1, ((2, 16),), 2)]
    first, second = simulate(trace, costs, FleetOptions(workers=WorkerOptions()))
    assert first.ttft_s == pytest.approx(0.014) and second.ttft_s == pytest.approx(0.060)


def test_a_file_has_all_measurements(tmp_path: Path) -> None:
    start = Start(16, 0.01, 0.004, 0.003)
    costs = replace(COSTS, warm=(start,), idle=(start, start), beside=(start,), turn_s=0.002, late_s=(0.01, -0.01))
    costs.save(path := tmp_path / "costs.json")
    assert load(path) == costs
    both = median([costs, replace(costs, turn_s=0.004)])
    assert (both.idle, both.late_s, both.turn_s) == ((start,) * 4, (0.01, -0.01) * 2, 0.003)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("idle", [{"num_tokens": 16, "prefill_s": -1.0, "front_s": 0.0, "hand_over_s": 0.0}]),
        ("warm", [{"num_tokens": 16}]),
        ("beside", [3]),
        ("late_s", [1e10]),
        ("turn_s", "slow"),
    ],
)
def test_an_invalid_measurement_is_refused(name: str, value: object, tmp_path: Path) -> None:
    COSTS.save(path := tmp_path / "costs.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    with pytest.raises(StartupError, match=r"--costs .*costs\.json"):
        load(path)
