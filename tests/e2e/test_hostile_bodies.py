"""Hostile bodies are refused, while other streams continue and the gateway's memory does not grow."""

from __future__ import annotations

from bench.served.hostile import HostileSettings, measure
from bench.served.hostile_bodies import HOSTILE_BODIES
from looseleaf import LLM
from testing.system import assert_nothing_held


def test_hostile_bodies_do_not_stop_other_streams(llm: LLM) -> None:
    settings = HostileSettings(repeats=1, quiet_s=0.15)
    bodies = HOSTILE_BODIES
    for _ in range(3):  # once more for each gap that may be a pause of the machine
        rows = measure(llm, bodies, settings)
        assert all(row.status == 400 for row in rows), rows
        assert all(row.rss_mib < 256 for row in rows), "was gigabytes"
        bodies = [b for b, row in zip(bodies, rows, strict=True) if row.gap_ms >= row.quiet_gap_ms + 1000]
        if not bodies:
            break
    assert not bodies, "a gap was seconds to minutes"
    assert_nothing_held(llm.addresses.block_store)
