"""The measurements of `looseleaf simulate --fit`, on a real server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from looseleaf import LLM
from looseleaf.simulation import replay
from looseleaf.simulation.costs import load
from looseleaf.simulation.fleet import FleetOptions, simulate
from looseleaf.simulation.trace import TraceRequest

VOCAB, LONGEST = 512, 1024


async def test_a_fit_measures_requests_in_every_situation(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(replay, "PAUSE_S", 0.1)
    costs = await replay.fit(llm.addresses.grpc, "tiny", 1024, VOCAB, LONGEST)
    lengths = set(replay.PREFILL_LENS)
    assert {start.num_tokens for start in costs.warm} == {*lengths, LONGEST}
    assert {start.num_tokens for start in costs.idle} == lengths
    assert costs.beside and {start.num_tokens for start in costs.beside} <= lengths
    assert all(start.prefill_s > 0 and start.front_s > 0 for start in (*costs.warm, *costs.idle))
    each = replay.OUTPUT - 2
    probes = [costs.late_s[begin : begin + each] for begin in range(0, len(costs.late_s), each)]
    assert len(probes) == len(costs.warm) + len(costs.idle)
    assert all(sum(late) == pytest.approx(0.0, abs=1e-6) for late in probes)
    costs.save(path := tmp_path / "costs.json")
    assert load(path) == costs
    trace = [TraceRequest(0.01 * number, ((number, 100),), 20) for number in range(20)]
    outcomes = await asyncio.to_thread(simulate, trace, costs, FleetOptions())
    assert all(len(outcome.token_times) == 20 and min(outcome.gaps_s) >= 0 for outcome in outcomes)
