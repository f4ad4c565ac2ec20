"""The benchmark of the front ends: its computations, and a short run of all its parts."""

from __future__ import annotations

from bench.served.frontend import KINDS, Cpu, FrontendSettings, Use, measure, medians, show, use_of


def test_idle_time_and_what_is_not_ours_are_subtracted() -> None:
    before, after = Cpu(1_000_000, 10, 5), Cpu(101_000_000, 16, 9)
    assert use_of((before, after, 2.0), 0.01, 1000, 30_000_000) == Use(50.0, 0.4)
    assert use_of((before, before, 2.0), 0.0, 0) == Use(0.0, 0.0)


def test_medians_go_into_nested_numbers() -> None:
    rounds = [{"a": 1.0, "b": {"c": 5.0}}, {"a": 9.0, "b": {"c": 1.0}}, {"a": 2.0, "b": {"c": 3.0}}]
    assert medians(rounds) == {"a": 2.0, "b": {"c": 3.0}}


def test_a_short_run_measures_both_front_ends_beside_the_floors() -> None:
    # There are so many messages that the process's other work in half a second is negligible.
    settings = FrontendSettings(streams=8, rate=50.0, seconds=0.5, rounds=1, full_rate=0.0)
    found = measure(settings)
    show(found)
    for kind in KINDS:
        served = found[kind]
        assert served["tokens_per_s"] > 5 and served["tokens_per_message"] > 0.5
        assert served["gateway"]["us_per_token"] > 1 and found[f"{kind}_floor"]["us_per_token"] > 1
