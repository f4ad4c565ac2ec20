"""The scenarios that kill the block store and the gateway under load, at the smallest size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from testing.chaos import central
from testing.chaos.run import Run
from testing.chaos.stack import Plan, Stack

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module")
def all_restarted(run: Run) -> Iterator[Stack]:
    with run.stack(Plan()) as running:
        yield running


def test_a_killed_store_costs_no_request_and_the_next_decode_worker_finds_its_successor(
    run: Run, all_restarted: Stack
) -> None:
    report = central.store_kill_on(replace(run, trials=2), all_restarted)
    assert report.good, report.text()


def test_a_killed_gateway_comes_back_to_warm_blocks_and_leaves_none_held(run: Run, all_restarted: Stack) -> None:
    report = central.gateway_kill_on(run, all_restarted)
    assert report.good, report.text()
