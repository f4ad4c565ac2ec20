"""Routing between processes with both roles: whether a prompt is computed in the process that decodes it."""

from __future__ import annotations

import pytest

from common import convert
from common.types import WorkerLoad, WorkerRecord
from gateway.fleet.costs import RouteCosts
from gateway.fleet.routing import Asked, Route, Router
from gateway.fleet.sharing import MOST_SHARE, STALL_WEIGHT, Batch, Prompts, StepTime, Targets
from gateway.fleet.worker_state import Pick
from testing.gateway.parts import make_record

RATE = 1000.0
STEP = StepTime(0.012, 0.001)


def always(record: object) -> bool:
    return True


def step_s(num_sequences: int) -> float:
    return STEP.fixed_s + num_sequences * STEP.sequence_s


def worker(process: str, step: StepTime = STEP) -> list[WorkerRecord]:
    """Returns the records of a process with both roles."""
    prefill = WorkerLoad(prompt_tokens_per_s=RATE)
    decode = WorkerLoad(step_fixed_s=step.fixed_s, step_token_s=step.sequence_s)
    return [
        make_record("prefill", f"{process}.prefill", address=process, load=prefill, prefill_step=100),
        make_record("decode", f"{process}.decode", address=process, load=decode, max_num_seqs=64),
    ]


def two_processes() -> Router:
    made = Router()
    made.update(worker("a") + worker("b"), 0.0)
    return made


def prefill(made: Router, num_tokens: int = 500) -> Pick:
    pick = made.pick_prefill(Asked(num_tokens), 0.0, always)
    assert pick is not None
    return pick


def decode(made: Router, process: str) -> str:
    pick = made.pick_decode(Route(made.workers[f"{process}.prefill"].record, Asked(500)), 0.0, always)
    assert pick is not None
    return pick.record.worker_id


def test_a_prompt_avoids_running_sequences_until_the_queue_elsewhere_costs_more() -> None:
    made = two_processes()
    made.workers["a.decode"].dispatched_sequences = 8
    made.workers["b.prefill"].dispatched_tokens = 7_000
    assert prefill(made).record.worker_id == "b.prefill", "7 s of waiting against 8 sequences that wait 0.5 s each"
    made.workers["b.prefill"].dispatched_tokens = 9_000
    assert prefill(made).record.worker_id == "a.prefill", "9 s of waiting"


def test_the_explanation_has_the_delay_and_the_time_between_tokens() -> None:
    made = two_processes()
    made.workers["a.decode"].dispatched_sequences = 8
    best, other = prefill(made).considered
    assert (best.worker_id, best.delay_s, best.itl_s) == ("b.prefill", 0.0, 0.0)
    assert other.delay_s == pytest.approx(8 * 0.5)
    assert other.predicted_s - best.predicted_s == pytest.approx(5 * step_s(8)), "a decode step follows each chunk"
    assert other.itl_s == pytest.approx(step_s(8) / (1 - 0.5 / made.costs.group_s))
    assert best.predicted_s < other.predicted_s + STALL_WEIGHT * other.delay_s


def test_sequences_avoid_waiting_prompts_until_the_batch_elsewhere_costs_more() -> None:
    made = two_processes()
    assert decode(made, "a") == "a.decode", "equal costs"
    made.workers["a.prefill"].dispatched_tokens = 500
    made.workers["b.decode"].dispatched_sequences = 4
    assert decode(made, "a") == "b.decode"
    made.workers["b.decode"].dispatched_sequences = 8
    assert decode(made, "a") == "a.decode"


def test_a_batch_costs_its_longer_steps_and_those_of_the_others() -> None:
    made = two_processes()
    made.workers["a.decode"].dispatched_sequences = 4
    pick = made.pick_decode(Route(made.workers["a.prefill"].record, Asked(500)), 0.0, always)
    assert pick is not None and pick.record.worker_id == "b.decode"
    alone, shared = pick.considered
    num_steps = made.costs.group_steps
    assert (alone.predicted_s, alone.delay_s) == (pytest.approx(num_steps * step_s(1)), 0.0)
    assert shared.predicted_s == pytest.approx(num_steps * step_s(5))
    assert shared.delay_s == pytest.approx(4 * STEP.sequence_s * num_steps / 2)
    assert (alone.itl_s, shared.itl_s) == (pytest.approx(step_s(1)), pytest.approx(step_s(5)))


def test_sequences_gather_where_no_prompts_arrive() -> None:
    made = two_processes()
    group_s = made.costs.group_s
    made.workers["a.prefill"].recent.add(int(0.2 * group_s * RATE), 0.0, group_s)
    for number in range(4):
        assert decode(made, "a") == "b.decode"
        made.workers["b.decode"].dispatched_sequences = number + 1
    assert prefill(made).record.worker_id == "a.prefill", "and prompts where no sequences are"


def test_a_worker_without_steps_is_expected_to_be_like_the_others() -> None:
    made = Router()
    new = worker("b", StepTime(0.0, 0.0))
    made.update([*worker("a"), *new, *worker("c", StepTime(0.022, 0.003))], 0.0)
    pick = made.pick_decode(Route(made.workers["a.prefill"].record, Asked(500)), 0.0, always)
    assert pick is not None
    found = {considered.worker_id: considered.itl_s for considered in pick.considered}
    assert found == pytest.approx({"a.decode": 0.013, "b.decode": 0.019, "c.decode": 0.025})
    made.update(new, 0.0)
    pick = made.pick_decode(Route(made.workers["b.prefill"].record, Asked(500)), 0.0, always)
    assert pick is not None
    assert (pick.considered[0].itl_s, pick.considered[0].predicted_s) == (0.0, made.costs.decode_s(0.0, 0.0))


def test_a_worker_whose_steps_were_slow_once_is_tried_again() -> None:
    made = Router()
    slow, fast = worker("a", StepTime(0.12, 0.01)), worker("b")
    made.update([*slow, *fast], 0.0)
    route, group_s = Route(made.workers["b.prefill"].record, Asked(500)), made.costs.group_s

    def picked(now: float, sequences: int) -> str:
        made.workers["b.decode"].dispatched_sequences = sequences
        made.report("b.decode", fast[1].load, now)
        pick = made.pick_decode(route, now, always)
        assert pick is not None
        return pick.record.worker_id

    assert picked(0.0, 4) == "b.decode"
    assert picked(0.1 * group_s, 4) == "b.decode"
    assert picked(4.0 * group_s, 0) == "b.decode", "it is not preferred"
    assert picked(4.0 * group_s, 4) == "a.decode", "its steps are expected to be like those of the others by now"
    made.report("a.decode", slow[1].load, 4.1 * group_s)
    assert picked(4.1 * group_s, 4) == "b.decode", "they are still slow"


def test_prompts_before_the_first_measurements_count_by_what_is_measured_later() -> None:
    """A gateway assumes slow prompts and long decodes until it knows better."""
    made = two_processes()
    made.workers["a.prefill"].recent.add(800, 0.0, made.costs.group_s)
    made.costs.note_decode(0.05, 20)
    pick = made.pick_decode(Route(made.workers["a.prefill"].record, Asked(500)), 0.0, always)
    assert pick is not None
    delays = {considered.worker_id: considered.delay_s for considered in pick.considered}
    assert delays == pytest.approx({"a.decode": 0.8 * 0.05 / 5.0, "b.decode": 0.0})


def test_mean_decodes_follow_the_groups() -> None:
    costs = RouteCosts()
    costs.note_decode(0.7, 10)
    first = costs.group_s, costs.group_steps
    assert first == (pytest.approx(0.7), pytest.approx(10)), "the first group replaces the assumption"
    for _ in range(300):
        costs.note_decode(0.5, 20)
    assert (costs.group_s, costs.group_steps) == (pytest.approx(0.5, rel=0.01), pytest.approx(20, rel=0.01))
    assert costs.decode_s(0.5, 0.03) == pytest.approx(20 * 0.03, rel=0.01)
    assert costs.decode_s(1.5, 0.03) == pytest.approx(0.5 * 0.5 + 20 * 0.03, rel=0.01), "a half of a batch waits"


def test_prompts_of_the_recent_past_count_until_they_are_forgotten() -> None:
    """A process that got many prompts will get more of them, although none waits there now."""
    made = two_processes()
    made.targets = Targets(itl_s=0.02)
    group_s = made.costs.group_s
    for name in ("a.decode", "b.decode"):
        made.workers[name].dispatched_sequences = 1
    made.workers["a.prefill"].recent.add(int(0.4 * group_s * RATE), 0.0, group_s)
    assert decode(made, "a") == "b.decode" and prefill(made).record.worker_id == "b.prefill"
    tokens_per_s = made.workers["b.prefill"].recent.tokens_per_s(0.0, group_s)
    assert tokens_per_s == pytest.approx(500 / group_s), "the prompt that was picked"
    made.workers["b.decode"].dispatched_sequences = 8
    later = 3 * group_s
    pick = made.pick_decode(Route(made.workers["b.prefill"].record, Asked(500)), later, always)
    assert pick is not None and pick.record.worker_id == "a.decode"


def test_prompts_never_take_all_of_the_time() -> None:
    assert Batch(1, STEP, 1.0).itl_s(Prompts(10_000, RATE)) == pytest.approx(step_s(1) / (1 - MOST_SHARE))


def test_a_prefill_worker_of_its_own_delays_nobody() -> None:
    made = Router()
    alone = make_record("prefill", "p", load=WorkerLoad(prompt_tokens_per_s=RATE))
    made.update([alone, *worker("a")], 0.0)
    made.workers["a.decode"].dispatched_sequences = 8
    assert prefill(made).record.worker_id == "p"
    made.workers["p"].dispatched_tokens = 9_000
    assert prefill(made).record.worker_id == "a.prefill"


def test_without_disaggregation_a_request_stays_in_one_process() -> None:
    made = two_processes()
    made.disaggregates = False
    made.workers["a.decode"].dispatched_sequences = 8
    made.workers["b.prefill"].dispatched_tokens = 100
    assert prefill(made).record.worker_id == "b.prefill"
    assert decode(made, "a") == "a.decode" and decode(made, "b") == "b.decode"
    made.workers["b.decode"].dispatched_sequences = 128
    assert prefill(made).record.worker_id == "a.prefill", "the queue for decode in the same process counts"
    made.update([worker("a")[0], worker("b")[1]], 0.0)
    assert not made.ready(always) and made.pick_prefill(Asked(1), 0.0, always) is None, "no process has both roles"
    made.disaggregates = True
    assert made.ready(always)


def test_routes_that_keep_the_limits_come_first() -> None:
    made = two_processes()
    made.workers["a.decode"].dispatched_sequences = 1
    made.workers["b.prefill"].dispatched_tokens = 1_200
    assert prefill(made).record.worker_id == "a.prefill"
    made.targets = Targets(itl_s=step_s(1))
    assert prefill(made).record.worker_id == "b.prefill", "a chunk would delay the sequence in a"
    made.targets = Targets(ttft_s=0.7, itl_s=1.3 * step_s(1))
    assert prefill(made).record.worker_id == "a.prefill", "both limits are kept only in a"
    made.targets = Targets(ttft_s=0.1, itl_s=step_s(1))
    assert prefill(made).record.worker_id == "a.prefill", "both routes miss a limit, and this is the cheaper one"


def test_a_load_report_carries_the_time_of_a_step() -> None:
    load = WorkerLoad(num_running=2, step_fixed_s=0.01, step_token_s=0.002)
    assert convert.load_from_pb(convert.load_to_pb(load)) == load
