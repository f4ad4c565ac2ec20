"""Tickets for the full blocks of a prompt that is still being computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from block_store.ledger.inspection import inspect
from common.ticket import Ticket
from common.types import Branch, SamplingParams, StoppingParams
from prefill_svc.early_tickets import MOST_TICKETS, EarlyTickets
from prefill_svc.events import ChunkDone, Done
from prefill_svc.job import Job

BLOCK = 16
GREEDY = SamplingParams(temperature=0.0)
STOPPING = StoppingParams(max_tokens=60)
PROMPT = [10 + i % 200 for i in range(100)]  # six full blocks and a partial one
Make = Callable[..., Any]


def put(world: Any, early: EarlyTickets | None, prompt: list[int] = PROMPT) -> tuple[Job, list[Any]]:
    job, events = Job.of(prompt, [Branch()], GREEDY, STOPPING), []
    job.early = early
    world.worker.submit(job, b"", events.append)
    return job, events


def early_of(events: list[Any]) -> list[Ticket]:
    return [event.early_ticket for event in events if isinstance(event, ChunkDone) and event.early_ticket is not None]


def blocks_of(ticket: Ticket) -> list[Any]:
    [[table]] = ticket.tables
    return list(table)


def test_each_full_block_is_in_one_early_ticket_and_all_of_them_in_the_last(make_world: Make) -> None:
    world = make_world(budget=32)
    _, events = put(world, EarlyTickets.of(0, 1, len(PROMPT)))
    world.run(events)
    early, done = early_of(events), events[-1]
    assert isinstance(done, Done) and done.ticket is not None
    assert [ticket.num_tokens for ticket in early] == [(32,), (64,), (96,)], "before each step but the first"
    assert [ref for ticket in early for ref in blocks_of(ticket)] == blocks_of(done.ticket)[:6]
    held = {holder.epoch: holder.num_references for holder in inspect(world.ledger).holders if holder.kind == "ticket"}
    assert [held[ticket.id.epoch] for ticket in (*early, done.ticket)] == [2, 2, 2, 7]
    for ticket in (*early, done.ticket):
        assert world.claim(ticket)[: len(blocks_of(ticket))]
    assert [event.num_computed_tokens for event in events[:-1]] == [32, 32, 64, 64, 96, 96]


def test_a_ticket_waits_until_it_is_worth_a_pull_and_leaves_out_what_the_other_arena_has(make_world: Make) -> None:
    world = make_world(budget=16)
    _, events = put(world, EarlyTickets.of(first_token=32, min_tokens=40, num_tokens=len(PROMPT)))
    world.run(events)
    early, done = early_of(events), events[-1]
    assert [blocks_of(ticket) for ticket in early] == [blocks_of(done.ticket)[2:5]], "one block is too little"
    for ticket in (*early, done.ticket):
        world.claim(ticket)
    assert EarlyTickets.of(0, 1, 16_000).min_tokens == 16_000 // MOST_TICKETS


def test_a_cached_prefix_goes_out_before_the_first_step(make_world: Make) -> None:
    world = make_world()
    world.claim(world.prefill(PROMPT, [Branch()], GREEDY, STOPPING).ticket)
    _, events = put(world, EarlyTickets.of(0, 1, len(PROMPT)))
    world.run(events)
    [early], done = early_of(events), events[-1]
    assert events[0] == ChunkDone(96, early) and done.sources.cached == 96
    for ticket in (early, done.ticket):
        world.claim(ticket)


def test_without_the_ledger_there_is_no_early_ticket_and_prefill_continues(make_world: Make) -> None:
    world = make_world(budget=32)
    job, events = put(world, EarlyTickets.of(0, 1, len(PROMPT)))
    world.worker.step()
    world.held.holder.breaker.open("a test")
    world.worker.step()
    assert world.held.fallbacks.counts["no early ticket"] == 1 and not early_of(events)
    assert job.trunk.num_computed == 64
    world.held.holder.lease.probe()
    world.run(events)
    early, done = early_of(events), events[-1]
    assert [ref for ticket in early for ref in blocks_of(ticket)] == blocks_of(done.ticket)[:6]
    for ticket in (*early, done.ticket):
        world.claim(ticket)


def test_a_prompt_that_is_cancelled_leaves_its_blocks_to_the_early_tickets_alone(make_world: Make) -> None:
    world = make_world(budget=32)
    job, events = put(world, EarlyTickets.of(0, 1, len(PROMPT)))
    world.worker.step()
    world.worker.step()
    [early] = early_of(events)
    world.worker.cancel(job)
    assert world.held.num_held == 0
    tickets = [holder for holder in inspect(world.ledger).holders if holder.kind == "ticket"]
    assert [(ticket.epoch, ticket.num_references) for ticket in tickets] == [(early.id.epoch, 2)]
    world.ledger.give_up(early.id)
    assert not [holder for holder in inspect(world.ledger).holders if holder.kind == "ticket"]


def test_a_model_with_windows_has_no_early_tickets(make_world: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(budget=32)
    monkeypatch.setattr(type(world.arena.layout), "slides", True)
    _, events = put(world, EarlyTickets.of(0, 1, len(PROMPT)))
    monkeypatch.setattr(world.worker._blocks, "_slides", False)
    world.run(events)
    assert not early_of(events) and world.held.fallbacks.counts["no early ticket"] == 1, "counted once for a prompt"
    world.claim(events[-1].ticket)
