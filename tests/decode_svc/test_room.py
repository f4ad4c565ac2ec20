"""The blocks that must be free before a group starts, and the blocks that are reserved for an outage of Redis."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.types import SamplingParams, StoppingParams
from decode_svc.costs import Costs
from engine.model_runner import ModelRunner
from testing.decode import DecodeBench

PROMPT = list(range(20, 30))
SAMPLED = SamplingParams(temperature=1.5, seed=11)
LONG, SHORT = StoppingParams(100, 100), StoppingParams(8, 8)


def test_beside_others_a_group_starts_with_one_block_more_for_each_of_its_sequences(small: DecodeBench) -> None:
    small.submit(0, PROMPT, SAMPLED, LONG)
    small.worker.step()
    held = small.held
    group = small.submit(1, PROMPT, replace(SAMPLED, num_sequences=3), SHORT)
    needed = len(small.worker._blocks.writes.needing_block(group.live)) + 3
    held.holder.lease.beat()
    others = small.prefill.alloc(held.num_free_hint - needed + 1)
    held.holder.lease.beat()
    assert held.num_free_hint == needed - 1
    small.worker.step()
    assert group not in small.scheduler.running
    small.prefill.release(others)
    held.holder.lease.beat()
    small.worker.step()
    assert group in small.scheduler.running
    small.run()


def test_the_reserve_covers_what_runs_and_no_more_than_an_eighth(
    small_runner: ModelRunner, redis_client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = DecodeBench(small_runner, tmp_path, redis_client, num_blocks=800, reserve=2)
    monkeypatch.setattr(Costs, "step_s", 0.075)  # in 6 s, 80 tokens and so 20 blocks
    for handle, reserve in ((0, 21), (1, 42), (2, 63), (3, 84), (4, 100)):
        bench.submit(handle, PROMPT, SAMPLED, LONG)
        bench.worker.step()
        bench.held.rejoining.settle_up()
        assert bench.held.num_reserved >= bench.held._reserve.target == reserve, handle
    for handle in range(5):
        bench.worker.cancel(bench.inbox.session, handle)
    bench.worker.step()
    assert bench.held._reserve.target == 2
    bench.close()
