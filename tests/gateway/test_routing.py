"""Routing: a pure policy that takes the time as an argument."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from common.group_need import GroupNeed, GroupRoom
from common.types import WorkerLoad
from gateway.fleet.costs import USUAL_COPY_START_S, USUAL_COPY_TOKEN_S
from gateway.fleet.routing import PUBLISHED_S, SUSPECT_S, Asked, Route, Router
from gateway.fleet.worker_state import REPORT_S, WorkerState
from testing.gateway.parts import make_record


def always(record: object) -> bool:
    return True


def router(num_prefill: int = 2, num_decode: int = 2, **overrides: object) -> Router:
    made = Router()
    records = [make_record("prefill", f"p{i}") for i in range(num_prefill)]
    records += [make_record("decode", f"d{i}", **overrides) for i in range(num_decode)]
    made.update(records, 0.0)
    return made


def picks(made: Router, count: int, *, dispatch: bool) -> Counter[str]:
    seen: Counter[str] = Counter()
    for _ in range(count):
        state = made.pick_prefill(Asked(100), 0.0, always)
        assert state is not None
        state.worker.dispatched_tokens += 100 if dispatch else 0
        seen[state.record.worker_id] += 1
    return seen


def test_equal_workers_take_turns() -> None:
    assert picks(router(), 10, dispatch=False) == {"p0": 5, "p1": 5}
    assert picks(router(3), 9, dispatch=True) == {"p0": 3, "p1": 3, "p2": 3}


def test_load_counts_at_dispatch_and_is_corrected_by_reports() -> None:
    made = router()
    made.workers["p0"].dispatched_tokens = 500
    assert picks(made, 4, dispatch=False) == {"p1": 4}
    made.report("p1", WorkerLoad(waiting_tokens=900), 0.0)
    assert picks(made, 4, dispatch=False) == {"p0": 4}
    later = made.pick_prefill(Asked(100), REPORT_S + 1, always)
    assert later is not None and later.record.worker_id == "p1", "an old report says nothing"


def test_a_load_in_the_registry_does_not_replace_a_newer_report() -> None:
    """A worker whose queue is empty again would get no prompts until it publishes its next record."""
    made = router()
    first, *others = [state.record for state in made.workers.values()]
    published = [replace(first, load=WorkerLoad(waiting_tokens=900)), *others]
    made.update(published, 10.0)
    assert made.workers["p0"].tokens_before(10.0) == 900
    made.report("p0", WorkerLoad(), 10.1)
    made.update(published, 10.2)
    assert made.workers["p0"].tokens_before(10.2) == 0
    made.update(published, 10.1 + PUBLISHED_S + 0.1)
    assert made.workers["p0"].tokens_before(10.1 + PUBLISHED_S + 0.1) == 900, "the worker has sent no report since"


def test_a_cached_prefix_in_another_arena_is_worth_a_queue() -> None:
    made = Router()
    pairs = [("x", "0"), ("y", "1")]
    made.update(
        [make_record(role, f"{role}{n}", arena_id=arena) for arena, n in pairs for role in ("prefill", "decode")], 0.0
    )
    made.workers["prefill1"].dispatched_tokens = 300
    state = made.pick_prefill(Asked(1000, {"y": 900}), 0.0, always)
    assert state is not None and state.record.worker_id == "prefill1"
    made.workers["prefill1"].dispatched_tokens = 2000
    state = made.pick_prefill(Asked(1000, {"y": 900}), 0.0, always)
    assert state is not None and state.record.worker_id == "prefill0"


def test_decode_is_picked_by_sequences_for_its_size() -> None:
    made = router(1)
    made.workers["d0"].dispatched_sequences = 3
    prefill = made.workers["p0"].record
    first = made.pick_decode(Route(prefill, Asked(100)), 0.0, always)
    assert first is not None and first.record.worker_id == "d1"
    made.update(
        [prefill, make_record("decode", "d0", max_num_seqs=64), make_record("decode", "d1", max_num_seqs=8)], 0.0
    )
    made.workers["d1"].dispatched_sequences = 1
    second = made.pick_decode(Route(prefill, Asked(100)), 0.0, always)
    assert second is not None and second.record.worker_id == "d0", "3 of 64 is less than 1 of 8"


def test_tickets_go_only_to_the_same_pairing_and_arena() -> None:
    for other in ({"pairing": "q"}, {"arena_id": "b"}):
        made = router(1, 1, **other)
        assert not made.ready(always) and made.pick_prefill(Asked(10), 0.0, always) is None
        assert made.pick_decode(Route(made.workers["p0"].record, Asked(100)), 0.0, always) is None
    assert router(1, 1).ready(always) and not router(1, 0).ready(always) and not router(0, 1).ready(always)
    assert not router(1, 1).ready(lambda record: False)


def test_draining_workers_get_nothing_and_those_that_left_are_forgotten() -> None:
    made = router(2, 2)
    records = [s.record for s in made.workers.values()]
    made.update([*records[1:], make_record("prefill", "p0", draining=True)], 0.0)
    assert picks(made, 4, dispatch=False) == {"p1": 4}
    made.update(records[1:], 0.0)
    assert "p0" not in made.workers and made.max_model_len() == 512 and made.capacity() == 16


def test_a_worker_that_failed_is_passed_over_for_a_while_unless_it_is_the_only_one() -> None:
    made = router()
    made.suspect("p0", 0.0)
    assert picks(made, 4, dispatch=False) == {"p1": 4}
    made.suspect("p1", 0.0)
    assert sum(picks(made, 4, dispatch=False).values()) == 4
    made.suspect("p1", SUSPECT_S)
    state = made.pick_prefill(Asked(1), SUSPECT_S + 0.1, always)
    assert state is not None and state.record.worker_id == "p0"


def test_a_group_goes_where_batch_and_floor_hold_it() -> None:
    need = GroupNeed(prompt_len=40, max_tokens=24, width=4)  # 2 shared blocks, 2 more per sequence, 1 during a copy
    assert GroupRoom.of(make_record("decode", "d", max_num_seqs=4, max_group_blocks=14)).holds(need)
    assert not GroupRoom.of(make_record("decode", "d", max_num_seqs=3, max_group_blocks=14)).holds(need)
    assert not GroupRoom.of(make_record("decode", "d", max_num_seqs=4, max_group_blocks=13)).holds(need)
    assert GroupRoom.of(make_record("decode", "d", max_num_seqs=4)).holds(need), "a worker that names no floor"


def test_only_workers_that_have_loaded_the_adapter_get_its_requests() -> None:
    made = Router()
    have, failed = {"aa": ""}, {"aa": "too large"}
    records = [make_record("prefill", "p0", adapters=have), make_record("prefill", "p1", adapters=failed)]
    records += [make_record("decode", "d0"), make_record("decode", "d1", adapters=have)]
    made.update(records, 0.0)
    for _ in range(3):
        prefill = made.pick_prefill(Asked(1, {}, "aa"), 0.0, always)
        assert prefill is not None and prefill.record.worker_id == "p0"
        decode = made.pick_decode(Route(prefill.record, Asked(1, {}, "aa")), 0.0, always)
        assert decode is not None and decode.record.worker_id == "d1"
    assert made.ready(always, "aa") and not made.ready(always, "bb")
    assert made.pick_prefill(Asked(1, {}, "bb"), 0.0, always) is None


def two_arenas(tokens_per_s: float) -> Router:
    """Returns a router with a prefill and a decode worker in each of the arenas x and y, between which blocks can be
    copied."""
    made = Router()
    load = WorkerLoad(prompt_tokens_per_s=tokens_per_s)
    made.update(
        [
            make_record(role, f"{role} {arena}", arena_id=arena, load=load)
            for arena in ("x", "y")
            for role in ("prefill", "decode")
        ],
        0.0,
    )
    made.stores = {"x": True, "y": True}
    return made


def route_of(made: Router, asked: Asked) -> tuple[str, str]:
    prefill = made.pick_prefill(asked, 0.0, always)
    assert prefill is not None
    decode = made.pick_decode(Route(prefill.record, asked), 0.0, always)
    assert decode is not None
    return prefill.record.arena_id, decode.record.arena_id


def fill(decode: WorkerState) -> None:
    decode.dispatched_sequences = 4 * decode.record.max_num_seqs


def test_a_prefix_in_an_arena_without_room_is_copied_over_a_fast_link_and_computed_beside_a_slow_one() -> None:
    asked = Asked(4000, {"x": 3900})
    for copy_s, route in ((0.1, ("x", "y")), (30.0, ("y", "y"))):
        made = two_arenas(tokens_per_s=1000)
        assert route_of(made, asked) == ("x", "x")
        fill(made.workers["decode x"])
        made.costs.note_copy("x", "y", 4000, copy_s, 0.0)
        assert route_of(made, asked) == route, copy_s


def test_blocks_that_the_destination_has_cached_cost_no_copy() -> None:
    made = two_arenas(tokens_per_s=100)
    made.costs.note_copy("x", "y", 1000, 10.0, 0.0)
    made.workers["decode x"].dispatched_sequences = 8
    prefill = made.workers["prefill x"].record
    nothing, all_but_one = Asked(1000), Asked(1000, {"y": 999})
    picked = [made.pick_decode(Route(prefill, asked), 0.0, always) for asked in (nothing, all_but_one)]
    assert [p and p.record.arena_id for p in picked] == ["x", "y"]


def test_a_slow_copy_is_forgotten_so_that_the_link_is_tried_again() -> None:
    costs = two_arenas(1000).costs
    costs.note_copy("x", "y", 1000, 50.0, 0.0)
    assert costs.copy_s("x", "y", 1000, 1.0) > 40.0
    assert costs.copy_s("x", "y", 1000, 3000.0) < 2.0
    assert costs.copy_s("y", "x", 1000, 1.0) < 1.0, "the other direction has not been measured"


def test_short_copies_do_not_make_long_ones_seem_slow() -> None:
    """The time to copy one block is mainly the time of the call, regardless of the link's rate."""
    costs = two_arenas(1000).costs
    for _ in range(50):
        costs.note_copy("x", "y", 16, 0.010, 0.0)
    assert costs.copy_s("x", "y", 10_000, 0.0) < 1.1 * (0.010 + 10_000 * USUAL_COPY_TOKEN_S)


def test_a_worker_whose_few_steps_were_slow_still_gets_prompts() -> None:
    made = two_arenas(1000)
    made.report("prefill y", WorkerLoad(prompt_tokens_per_s=10.0), 0.0)
    made.workers["prefill x"].dispatched_tokens = 1
    assert route_of(made, Asked(100)) == ("y", "y")


def test_the_destination_is_predicted_without_a_pick() -> None:
    made = router(num_prefill=1, num_decode=2)
    route = Route(made.workers["p0"].record, Asked(100))
    assert [made.destination(route, 0.0, always) for _ in range(3)] == [route.prefill.arena_id] * 3
    first, second = (made.pick_decode(route, 0.0, always) for _ in range(2))
    assert first and second and [first.record.worker_id, second.record.worker_id] == ["d0", "d1"], "turns are not lost"
    assert made.destination(route, 0.0, lambda record: False) is None


def test_a_part_of_a_prompt_is_worth_an_early_pull_if_its_copy_takes_as_long_as_the_start_of_a_copy() -> None:
    costs = Router().costs
    assert costs.worthwhile_tokens("a", "b", 0.0) == round(USUAL_COPY_START_S / USUAL_COPY_TOKEN_S)
    for _ in range(60):
        for tokens in (100, 1000, 4000):
            costs.note_copy("a", "b", tokens, 0.02 + tokens * 1e-3, 1.0)  # a slow link
            costs.note_copy("a", "c", tokens, 0.02 + tokens * 1e-6, 1.0)  # a fast one
    assert 15 <= costs.worthwhile_tokens("a", "b", 1.0) <= 25
    assert costs.worthwhile_tokens("a", "c", 1.0) > 10_000, "longer than most prompts"
