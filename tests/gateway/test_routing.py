"""Routing: a pure policy that takes the time as an argument."""

from __future__ import annotations

from collections import Counter

from common.group_need import GroupNeed, GroupRoom
from common.types import WorkerLoad
from gateway.fleet.routing import REPORT_S, SUSPECT_S, Router
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
        state = made.pick_prefill(100, {}, 0.0, always)
        assert state is not None
        state.dispatched_tokens += 100 if dispatch else 0
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
    later = made.pick_prefill(100, {}, REPORT_S + 1, always)
    assert later is not None and later.record.worker_id == "p1", "an old report says nothing"


def test_a_cached_prefix_in_another_arena_is_worth_a_queue() -> None:
    made = Router()
    pairs = [("x", "0"), ("y", "1")]
    made.update(
        [make_record(role, f"{role}{n}", arena_id=arena) for arena, n in pairs for role in ("prefill", "decode")], 0.0
    )
    made.workers["prefill1"].dispatched_tokens = 300
    state = made.pick_prefill(1000, {"y": 900}, 0.0, always)
    assert state is not None and state.record.worker_id == "prefill1"
    made.workers["prefill1"].dispatched_tokens = 2000
    state = made.pick_prefill(1000, {"y": 900}, 0.0, always)
    assert state is not None and state.record.worker_id == "prefill0"


def test_decode_is_picked_by_sequences_for_its_size() -> None:
    made = router(1)
    made.workers["d0"].dispatched_sequences = 3
    prefill = made.workers["p0"].record
    first = made.pick_decode(prefill, 0.0, always)
    assert first is not None and first.record.worker_id == "d1"
    made.update(
        [prefill, make_record("decode", "d0", max_num_seqs=64), make_record("decode", "d1", max_num_seqs=8)], 0.0
    )
    made.workers["d1"].dispatched_sequences = 1
    second = made.pick_decode(prefill, 0.0, always)
    assert second is not None and second.record.worker_id == "d0", "3 of 64 is less than 1 of 8"


def test_tickets_go_only_to_the_same_pairing_and_arena() -> None:
    for other in ({"pairing": "q"}, {"arena_id": "b"}):
        made = router(1, 1, **other)
        assert not made.ready(always) and made.pick_prefill(10, {}, 0.0, always) is None
        assert made.pick_decode(made.workers["p0"].record, 0.0, always) is None
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
    state = made.pick_prefill(1, {}, SUSPECT_S + 0.1, always)
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
        prefill = made.pick_prefill(1, {}, 0.0, always, "aa")
        assert prefill is not None and prefill.record.worker_id == "p0"
        decode = made.pick_decode(prefill.record, 0.0, always, "aa")
        assert decode is not None and decode.record.worker_id == "d1"
    assert made.ready(always, "aa") and not made.ready(always, "bb")
    assert made.pick_prefill(1, {}, 0.0, always, "bb") is None
