"""The routing benchmark with simulated hosts."""

from __future__ import annotations

import statistics

import pytest

from bench.routing import NEVER_S, FixedCosts, Fleet, chats
from gateway.fleet.costs import RouteCosts


def fleet(link_tokens_per_s: float, costs: RouteCosts) -> Fleet:
    made = Fleet(4, link_tokens_per_s, costs)
    made.run(chats(seed=2, count=600, requests_per_s=5.0))
    return made


@pytest.mark.parametrize(("link", "better", "least", "most"), [(250.0, NEVER_S, 0, 60), (128_000.0, 0.0, 120, 600)])
def test_prefixes_are_copied_over_fast_links_and_computed_beside_slow_ones(
    link: float, better: float, least: int, most: int
) -> None:
    measured = fleet(link, RouteCosts())
    assert least < measured.num_copied < most
    right, wrong = (fleet(link, FixedCosts(copy_s)) for copy_s in (better, NEVER_S - better))
    assert statistics.fmean(right.regrets) < statistics.fmean(wrong.regrets)
    assert statistics.fmean(measured.regrets) < (statistics.fmean(right.regrets) + statistics.fmean(wrong.regrets)) / 2
