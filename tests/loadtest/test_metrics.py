"""Records: what processes send adds up to what one process would have recorded, and quantiles are exact to 1 %."""

from __future__ import annotations

import random

import msgpack
import pytest

from loadtest.metrics import CELL_S, MOST_CELLS, Record, Slo


def observe(records: list[Record], at_s: float, seconds: float) -> None:
    for record in records:
        for tally in record.at(at_s):
            tally.sent += 1
            tally.observe("ttft", seconds)
            status = f"status {int(at_s) % 3}"
            tally.failed[status] = tally.failed.get(status, 0) + 1


def test_merged_records_equal_the_record_of_the_union() -> None:
    rng = random.Random(5)
    whole, workers, master = Record(), [Record() for _ in range(3)], Record()
    for number in range(3000):
        observe([whole, rng.choice(workers)], 1000.0 + number / 50, rng.lognormvariate(-3, 1))
        if number % 700 == 0 or number == 2999:
            for worker in workers:  # as locust sends it
                master.add(msgpack.loads(msgpack.dumps(worker.take()), strict_map_key=False))
    assert [worker.total.sent for worker in workers] == [0, 0, 0]
    assert master.cells.keys() == whole.cells.keys()
    for merged, expected in [(master.total, whole.total), *((master.cells[at], whole.cells[at]) for at in whole.cells)]:
        assert merged.sent == expected.sent and merged.failed == expected.failed
        assert merged.times["ttft"].counts == expected.times["ttft"].counts
        assert merged.times["ttft"].most == expected.times["ttft"].most
        assert merged.times["ttft"].total == pytest.approx(expected.times["ttft"].total)
    assert (master.first_s, master.last_s) == (whole.first_s, whole.last_s)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 0.99, 1.0])
def test_quantiles_are_exact_to_one_percent(share: float) -> None:
    rng = random.Random(2)
    values = [rng.lognormvariate(-4, 2) for _ in range(999)]
    record = Record()
    for value in values:
        observe([record], 0.0, value)
    exact = sorted(values)[min(998, int(999 * share))]
    assert record.total.times["ttft"].quantile(share) == pytest.approx(exact, rel=0.01)


def test_a_long_run_has_a_bounded_number_of_intervals() -> None:
    source, master, alone = Record(), Record(), Record()
    for number in range(MOST_CELLS * 5):
        observe([source, alone], float(number * CELL_S), 0.1)
        master.add(source.take())
    for record in (master, alone):
        assert MOST_CELLS / 2 <= len(record.cells) <= MOST_CELLS
        assert record.width_s == 8 * CELL_S
        assert sum(cell.sent for cell in record.cells.values()) == record.total.sent == MOST_CELLS * 5


@pytest.mark.parametrize(
    "times,met",
    [({"ttft": 0.5, "tpot": 0.05}, True), ({"ttft": 0.51, "tpot": 0.05}, False), ({"ttft": 0.1, "tpot": 0.06}, False)],
)
def test_a_request_must_meet_all_limits(times: dict[str, float], met: bool) -> None:
    assert Slo(ttft_s=0.5, tpot_s=0.05).met(times) is met


def test_a_request_of_one_token_has_no_tpot_to_miss() -> None:
    assert Slo(ttft_s=0.5, tpot_s=0.05).met({"ttft": 0.2, "e2e": 0.2})
