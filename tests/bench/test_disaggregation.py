"""The comparison of arrangements of the roles, without its real servers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.served.disaggregation import WORKLOADS, DisaggregationSettings, main, trace
from common.errors import StartupError
from looseleaf.simulation.costs import Costs

COSTS = Costs("m", 4096, ((1.0, 0.01), (512.0, 0.2)), 1e-8, ((1.0, 0.005), (32.0, 0.03)), 1e-7)


def settings(*words: str) -> DisaggregationSettings:
    return DisaggregationSettings.load(["--seconds", "20", *words])


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_trace_offers_about_the_load_that_was_asked_for(name: str) -> None:
    few = trace(name, COSTS, 8, settings(), 1)
    many = trace(name, COSTS, 8, settings("--offered", "1.2"), 1)
    assert 1.6 < len(many) / len(few) < 2.4
    assert trace(name, COSTS, 8, settings(), 1) == few != trace(name, COSTS, 8, settings(), 2)
    assert max(request.prompt_len + request.output_len for request in few) <= 1280


def test_the_simulation_prints_every_arrangement_and_the_regrets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    COSTS.save(tmp_path / "costs.json")
    main(settings("--rounds", "0", "--costs", str(tmp_path / "costs.json"), "--fleets", "[4]"))
    *_, last = capsys.readouterr().out.splitlines()
    [results] = json.loads(last)["results"].values()
    assert list(results) == list(WORKLOADS)
    for found in results.values():
        regret = found.pop("regret")
        adaptive = found.pop("adaptive")
        assert len(found) == 2 and all(figures["tokens_per_s"] > 0 for figures in found.values())
        best = max(figures["good_per_s"] for figures in found.values())
        assert adaptive["good_per_s"] == pytest.approx(best * (1 - regret["good_per_s"]))


def test_costs_that_are_neither_measured_nor_given_are_an_error() -> None:
    with pytest.raises(StartupError, match="--rounds 0 needs --costs"):
        main(settings("--rounds", "0"))
