"""Hostile bodies are refused, while other streams continue and the gateway's memory does not grow."""

from __future__ import annotations

from bench.served.hostile import HostileSettings, measure
from bench.served.hostile_bodies import HOSTILE_BODIES
from looseleaf import LLM
from testing.system import assert_nothing_held


def test_hostile_bodies_do_not_stop_other_streams(llm: LLM) -> None:
    settings = HostileSettings(repeats=1, quiet_s=0.15)
    for row in measure(llm, HOSTILE_BODIES, settings):
        assert row.status == 400, row
        assert row.gap_ms < row.quiet_gap_ms + 1000, "was seconds to minutes"
        assert row.rss_mib < 256, "was gigabytes"
    assert_nothing_held(llm.addresses.block_store)
