"""Tests of the simulator on small generated traces."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from common.errors import StartupError
from looseleaf.simulation.costs import Costs, Start
from looseleaf.simulation.fleet import FleetOptions, simulate
from looseleaf.simulation.outcome import Outcome
from looseleaf.simulation.report import Slo, Summary, plan
from looseleaf.simulation.trace import TraceRequest
from looseleaf.simulation.worker import WorkerOptions
from prefill_svc.scheduler import PrefillScheduler

COSTS = Costs(
    "m",
    4096,
    ((1.0, 0.010), (512.0, 0.110)),
    1e-8,
    ((1.0, 0.010), (32.0, 0.030)),
    1e-7,
    front_s=0.004,
    hand_over_s=0.003,
)
SMALL = WorkerOptions(num_blocks=160, max_model_len=512, max_num_seqs=16)


def requests(count: int, rate: float, seed: int = 1) -> list[TraceRequest]:
    """Returns requests of which half begin with one of two common prefixes."""
    rng = random.Random(seed)
    at_s, found = 0.0, []
    for number in range(count):
        shared = [(rng.randrange(2), 64)] if rng.random() < 0.5 else []
        found.append(TraceRequest(at_s, (*shared, (100 + number, rng.randint(5, 150))), rng.randint(1, 90)))
        at_s += rng.expovariate(rate)
    return found


def check_ends(trace: list[TraceRequest], outcomes: list[Outcome]) -> None:
    """Checks that each request ends with all of its tokens, in order. `simulate` checks that no block is held."""
    for request, outcome in zip(trace, outcomes, strict=True):
        assert outcome.refusal or len(outcome.token_times) == request.output_len
        assert list(outcome.token_times) == sorted(outcome.token_times)
        assert outcome.refusal or outcome.ttft_s > 0


@pytest.mark.parametrize("preemption", ["swap", "give-back", "auto"])
@pytest.mark.parametrize("hosts", [1, 3])
def test_every_request_ends_and_every_block_is_free_under_pressure(hosts: int, preemption: str) -> None:
    trace = requests(200, 60.0)
    workers = replace(SMALL, preemption=preemption)  # type: ignore[arg-type]
    options = FleetOptions(hosts, 1, 1, turns=hosts == 1, max_queue=1000, max_queue_wait_s=1e3, workers=workers)
    outcomes = simulate(trace, COSTS, options)
    check_ends(trace, outcomes)
    assert not any(outcome.refusal for outcome in outcomes)
    if hosts == 1:
        assert sum(outcome.preemptions for outcome in outcomes) > 0, "the arena is large enough for all"


def test_the_same_trace_has_the_same_outcome_twice() -> None:
    trace, options = requests(150, 40.0), FleetOptions(2, 1, 2, workers=SMALL)
    assert simulate(trace, COSTS, options) == simulate(trace, COSTS, options)


def test_one_request_takes_the_times_that_were_measured() -> None:
    [outcome] = simulate([TraceRequest(0.0, ((1, 512),), 3)], COSTS, FleetOptions(workers=WorkerOptions()))
    prefill_s = 0.110 + 1e-8 * 512 * 256
    assert outcome.ttft_s == pytest.approx(0.004 + prefill_s)
    assert outcome.gaps_s == pytest.approx([0.003 + 0.010 + 1e-7 * 512, 0.010 + 1e-7 * 513])


def test_prefill_takes_longer_after_a_pause() -> None:
    """The measurements are used in turn, and only if the cores were idle before."""
    alone_s = COSTS.prefill_s([(0, 64)])
    costs = replace(
        COSTS, idle=tuple(Start(64, factor * alone_s, COSTS.front_s, COSTS.hand_over_s) for factor in (2.0, 3.0))
    )
    arrivals = (0.0, 1.0, 1.2, 5.0)
    trace = [TraceRequest(at_s, ((number, 64),), 60) for number, at_s in enumerate(arrivals)]
    options = FleetOptions(turns=True, workers=WorkerOptions())
    plain, after_pauses = ([one.ttft_s - COSTS.front_s for one in simulate(trace, c, options)] for c in (COSTS, costs))
    step_s = plain[0]
    assert after_pauses == pytest.approx([2 * step_s, 3 * step_s, plain[2], 2 * step_s], abs=0.011)
    assert plain[2] < 2 * step_s, "a decode step came before"


def test_a_prefix_is_computed_once() -> None:
    trace = [TraceRequest(0.0, ((1, 256), (2, 20)), 2), TraceRequest(1.0, ((1, 256), (3, 20)), 2)]
    first, second = simulate(trace, COSTS, FleetOptions(workers=SMALL))
    assert (first.cached_tokens, second.cached_tokens) == (0, 256)
    assert second.ttft_s < first.ttft_s


def test_prefill_serves_in_order_of_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy is that of the real scheduler: the outcome differs if its queue serves the last arrival first."""
    trace = [TraceRequest(0.001 * n, ((n, 400),), 2) for n in range(12)]
    options = FleetOptions(workers=WorkerOptions(max_model_len=512))
    firsts = [outcome.token_times[0] for outcome in simulate(trace, COSTS, options)]
    assert firsts == sorted(firsts)
    add = PrefillScheduler.add

    def add_before_others(scheduler: PrefillScheduler, job: object) -> None:
        job.priority -= scheduler._arrivals  # type: ignore[attr-defined]
        add(scheduler, job)  # type: ignore[arg-type]

    monkeypatch.setattr(PrefillScheduler, "add", add_before_others)
    other = [outcome.token_times[0] for outcome in simulate(trace, COSTS, options)]
    assert other != sorted(other)


def test_decode_never_runs_more_sequences_than_its_limit() -> None:
    trace = [TraceRequest(0.0, ((n, 16),), 40) for n in range(24)]
    few = simulate(trace, COSTS, FleetOptions(workers=replace(SMALL, num_blocks=1000, max_num_seqs=4)))
    many = simulate(trace, COSTS, FleetOptions(workers=replace(SMALL, num_blocks=1000, max_num_seqs=24)))
    assert Summary.of(few).itl_p50 < Summary.of(many).itl_p50
    assert Summary.of(few).tokens_per_s < Summary.of(many).tokens_per_s


def test_admission_refuses_what_exceeds_its_queue() -> None:
    trace = [TraceRequest(0.0, ((n, 16),), 40) for n in range(30)]
    outcomes = simulate(trace, COSTS, FleetOptions(max_queue=10, workers=SMALL))
    assert sum("max_queue" in outcome.refusal for outcome in outcomes) == 20
    check_ends(trace, outcomes)


def test_turns_slow_decode_down_while_a_prompt_is_computed() -> None:
    trace = [TraceRequest(0.0, ((0, 16),), 60), *(TraceRequest(0.1 * n, ((n, 400),), 1) for n in range(1, 6))]
    apart, together = (
        simulate(trace, COSTS, FleetOptions(turns=turns, workers=replace(SMALL, num_blocks=1000)))[0].tpot_s
        for turns in (False, True)
    )
    assert together > 1.2 * apart


def test_max_itl_bounds_the_gaps_that_prompts_make_only_where_workers_take_turns() -> None:
    """Without a limit, a prefill step of 512 tokens takes 110 ms."""
    prompts = [TraceRequest(0.5 * n, ((n, 600),), 1) for n in range(1, 6)]
    trace = [TraceRequest(0.0, ((0, 16),), 200), *prompts]
    workers = replace(SMALL, num_blocks=1000, max_model_len=1024)

    def longest_gap_s(turns: bool, max_itl_s: float) -> float:
        options = FleetOptions(turns=turns, workers=replace(workers, max_itl_s=max_itl_s))
        outcomes = simulate(trace, COSTS, options)
        check_ends(trace, outcomes)
        return max(outcomes[0].gaps_s)

    assert longest_gap_s(True, 0.0) > 0.1
    assert longest_gap_s(True, 0.06) < 0.1
    assert longest_gap_s(False, 0.0) == longest_gap_s(False, 0.06) < 0.02


def test_processes_with_both_roles_take_turns_and_split_the_work_if_the_router_may() -> None:
    """One long output decodes while prompts arrive. The router computes them in the process that decodes nothing."""
    trace = [TraceRequest(0.0, ((0, 16),), 100), *(TraceRequest(0.2 * n, ((n, 400),), 1) for n in range(1, 6))]
    one, tied, free = (
        FleetOptions(prefill=0, decode=0, both=count, disaggregates=may, workers=replace(SMALL, num_blocks=1000))
        for count, may in ((1, True), (2, False), (2, True))
    )
    alone_s = simulate(trace[:1], COSTS, one)[0].tpot_s
    assert simulate(trace, COSTS, one)[0].tpot_s > 1.2 * alone_s
    assert simulate(trace, COSTS, free)[0].tpot_s == pytest.approx(alone_s)
    for options in (one, tied, free):
        check_ends(trace, simulate(trace, COSTS, options))


@pytest.mark.parametrize("disaggregates", [False, True])
def test_processes_with_both_roles_end_every_request_under_pressure(disaggregates: bool) -> None:
    workers = replace(SMALL, num_blocks=320)
    options = FleetOptions(
        prefill=0, decode=0, both=2, disaggregates=disaggregates, max_queue=1000, max_queue_wait_s=1e3, workers=workers
    )
    trace = requests(200, 80.0)
    outcomes = simulate(trace, COSTS, options)
    check_ends(trace, outcomes)
    assert sum(outcome.preemptions for outcome in outcomes) > 0


def test_a_plan_ends_with_the_fewest_workers_that_meet_the_slo() -> None:
    trace = requests(150, 12.0)
    options = FleetOptions(workers=replace(SMALL, num_blocks=2000), max_queue=1000)
    slo = Slo(ttft_s=0.15, tpot_s=0.05)
    trials = list(plan(trace, COSTS, options, slo, most=6))
    last = max(trial.prefill + trial.decode for trial in trials)
    met = [trial.prefill + trial.decode for trial in trials if trial.attained >= slo.share]
    assert met and set(met) == {last}


def test_a_request_that_is_too_long_is_named() -> None:
    with pytest.raises(StartupError, match="request 1 of the trace has 600 tokens, more than --max-model-len 512"):
        simulate([TraceRequest(0, ((0, 5),), 1), TraceRequest(0, ((1, 590),), 10)], COSTS, FleetOptions(workers=SMALL))


def test_a_small_arena_is_refused() -> None:
    with pytest.raises(StartupError, match="--num-blocks 20: the floors of 2 workers need 66 blocks"):
        simulate(requests(1, 1.0), COSTS, FleetOptions(workers=replace(SMALL, num_blocks=20)))
