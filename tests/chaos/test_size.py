"""The ledger at some size, with a real Redis that is killed; `make chaos` has it at the size of a GPU's arena."""

from __future__ import annotations

from pathlib import Path

import pytest

from looseleaf.chaos.run import Run
from looseleaf.chaos.size import ledger_size_within

pytestmark = pytest.mark.chaos
SLACK = 10.0
"""Tests share their cores; before calls were bounded a holder of so much never had its ledger back here."""


def test_a_holder_of_much_has_its_ledger_back_and_no_script_is_long() -> None:
    report = ledger_size_within(Run(Path(), [], trials=12_000, seed=1), SLACK)
    assert report.good, report.text()
