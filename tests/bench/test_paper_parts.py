"""The measurements of `make paper` that serve requests: their rules, and rehearsals with one small deployment."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from bench.paper import batching, contiguous, front, goodput, hand_over, interference, load, no_cache
from bench.paper.memory_arms import Contiguous, Paged, simulate
from bench.paper.parts import Options
from common.types import KvLayout, KvSpec
from engine.model_runner import ModelRunner, RunnerSettings
from engine.tiny import make_checkpoint
from looseleaf.llm import LLM
from looseleaf.simulation.costs import Costs
from looseleaf.simulation.outcome import Outcome
from looseleaf.simulation.report import Slo

COSTS = Costs("m", 4096, ((1.0, 0.01), (512.0, 0.2)), 1e-8, ((1.0, 0.005), (32.0, 0.03)), 1e-7)
QUICK = Options(quick=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    # Many layers, so that decodes last longer than a pause of this process on a busy machine.
    model = make_checkpoint(tmp_path_factory.mktemp("served"), num_hidden_layers=48, max_position_embeddings=16384)
    with LLM(str(model), roles="split", num_blocks=4096, block_size=16) as served:
        yield served


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    model = make_checkpoint(tmp_path_factory.mktemp("model"))
    return ModelRunner(RunnerSettings(str(model), load_format="dummy", block_size=4))


def test_goodput_is_the_rate_at_which_too_few_requests_meet_the_limits() -> None:
    def points(*shares: float) -> list[dict[str, float]]:
        return [{"rate": float(rate), "attained": share, "requests": 50.0} for rate, share in enumerate(shares, 1)]

    assert goodput.goodput(points(1.0, 0.95, 0.85, 0.5)) == pytest.approx(2.5)
    assert goodput.goodput(points(0.8)) == pytest.approx(0.5)
    assert goodput.goodput(points(1.0, 0.9)) == 2.0
    assert goodput.falling(points(0.8, 1.0, 0.9, 0.7, 0.5, 0.6)) == pytest.approx([0.9, 0.9, 0.9, 0.7, 0.55, 0.55])
    assert goodput.falling(points(0.4, 0.5, 0.6)) == pytest.approx([0.5, 0.5, 0.5])
    weighted = [{"rate": 1.0, "attained": 0.8, "requests": 30.0}, {"rate": 2.0, "attained": 1.0, "requests": 90.0}]
    assert goodput.falling(weighted) == pytest.approx([0.95, 0.95])
    assert goodput.goodput([*points(0.85, 1.0), {"rate": 3.0, "attained": 0.6, "requests": 50.0}]) > 2.0
    late, slow = Outcome(0.0, (1.2, 1.21)), Outcome(0.0, (0.5, 0.6))
    good, refused = Outcome(0.0, (0.5, 0.52)), Outcome(0.0, refusal="full")
    assert goodput.point_of(1.0, [good, good, late, slow, refused], Slo(1.0, 0.03))["attained"] == 0.4


def test_the_simulated_arrangements_and_their_goodput() -> None:
    found = goodput.predict(COSTS, 2, 3.0)
    assert list(found) == ["split 1p1d", "both", "chunked", "adaptive"]
    for points in found.values():
        assert [point["rate"] for point in points] == sorted(point["rate"] for point in points)
        assert goodput.goodput(points) > 0
    assert goodput.trace(2.0, 5.0, 0) == goodput.trace(2.0, 5.0, 0) != goodput.trace(2.0, 5.0, 1)


def test_an_exponent_is_fitted() -> None:
    assert no_cache.exponent([(x, 3 * x**1.7) for x in (2.0, 5.0, 11.0)]) == pytest.approx(1.7)


def test_the_same_tokens_without_a_cache_as_with_one(runner: ModelRunner) -> None:
    cached, tokens = no_cache.token_times(runner, 20, cached=True)
    again, same = no_cache.token_times(runner, 20, cached=False)
    assert tokens == same and len(cached) == len(again) == len(tokens) == 20


def test_contiguous_and_paged_arms_generate_the_same_tokens(runner: ModelRunner) -> None:
    requests = [(20, 12), (9, 30), (40, 6), (17, 17), (30, 20), (12, 9)]
    outputs = []
    for arm in (Contiguous("max", 160, 64), Contiguous("pow2", 160, 64), Paged(112, 4)):
        engine = contiguous.Engine(runner, arm, 160)
        shares = simulate(engine, requests, warm=0.0, compute=engine.compute)
        assert engine.counted, "no step was counted"
        outputs.append(engine.outputs)
        assert [len(engine.outputs[handle]) for handle in range(len(requests))] == [output for _, output in requests]
    assert shares.preempted > 0, "the paged arm had enough blocks"
    assert outputs[0] == outputs[1] == outputs[2]


def test_padding_is_counted_by_batch() -> None:
    assert batching.longest_over_mean([1] * 15 + [17] + [4] * 4) == pytest.approx((16 * 17 + 4 * 4) / (32 + 16))
    requests = batching.work(40, 1)
    assert [len(batch) for batch in batching.batches(requests)] == [16, 16, 8]
    assert all(1 <= num_tokens <= batching.MOST_OUTPUT for _, num_tokens in requests)


def test_the_rate_at_which_the_latency_doubles() -> None:
    points = [{"rate": rate, "latency_ms": ms} for rate, ms in ((1.0, 10.0), (2.0, 12.0), (4.0, 28.0))]
    assert load.crossing(points, 2.0) == pytest.approx(3.0)
    assert load.crossing(points, 3.0) is None
    assert load.normalised_s(Outcome(1.0, (2.0, 3.0, 4.0))) == 1.0


def test_a_rehearsal_of_batches_loads_gaps_and_hand_overs(llm: LLM) -> None:
    address = llm.addresses.grpc
    arms = asyncio.run(batching.rounds(address, QUICK))
    assert list(arms) == list(batching.ARMS) and all(done["tokens_per_s"] > 0 for done in arms.values())
    assert [row["batch"] for row in asyncio.run(load.batch_rows(address, (1, 3), 400))] == [1, 3]
    [row] = asyncio.run(interference.gaps(address, (200,), 1, most=8000))
    assert row["worst_ms"] > 0 and row["ttft_ms"] > 0
    short, long = asyncio.run(hand_over.on_one_host(address, (16, 200), 1))
    assert 0 < short["hand_over_ms"] < short["total_ms"] and long["prompt"] == 200


def test_requests_per_second_and_cpu_time_per_request(llm: LLM) -> None:
    row = front.closed_loop("http", llm.addresses.http, 2, llm.pids, 0.5)
    assert row["requests_per_s"] > 0 and row["us"]["gateway"] > 0 and "clients" in row["us"]


def test_pulls_between_two_stores() -> None:
    layout = KvLayout(16, (KvSpec(num_layers=1, num_kv_heads=1, head_dim=8, dtype="bfloat16"),))
    rows = hand_over.between_hosts(layout, (16, 100), 1)
    assert [row["bytes"] for row in rows] == [layout.block_bytes, 7 * layout.block_bytes]
    assert all(row["pull_ms"] > 0 for row in rows)
