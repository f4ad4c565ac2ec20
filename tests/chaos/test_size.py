"""A Redis with a large ledger is killed. `make chaos` runs this at the size of a GPU's arena."""

from __future__ import annotations

import pytest

from testing.chaos.report import Report
from testing.chaos.size import Size, within

pytestmark = pytest.mark.chaos
SLACK = 10.0
"""The factor for the time limits, because tests share their cores. An earlier version with unbounded calls never got
its ledger back.
"""


@pytest.mark.parametrize("size", [Size.of(8_000), Size(12_000, 0, 0)], ids=["held by four", "held by one"])
def test_holders_of_much_have_their_ledger_back_and_no_script_is_long(size: Size) -> None:
    report = within(Report("size", size.num_references, seed=1), size, SLACK)
    assert report.good, report.text()
