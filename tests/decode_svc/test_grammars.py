"""Decode with grammars: a group's commands wait while its grammar is compiled; a grammar that fails affects only its
group.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from common.types import FinishReason, SamplingParams, StoppingParams, StructuredOutput
from decode_svc.compiling import Compiling
from decode_svc.outputs import Rejection
from decode_svc.scheduler import Group
from engine import grammar_state
from engine.sequence import Sequence
from testing.decode import DecodeBench
from worker.grammars import MAX_COMPILED, Grammars

PROMPT = [7, 8, 9, 10, 11]
STOPPING = StoppingParams(max_tokens=20, stop_token_ids=(2,))


def sampling(pattern: str | None, **more: int) -> SamplingParams:
    structured = None if pattern is None else StructuredOutput("regex", pattern)
    return SamplingParams(temperature=0.0, structured=structured, **more)


def group(handle: int, pattern: str | None) -> Group:
    return Group(handle, 0, [Sequence(PROMPT, [], sampling(pattern), STOPPING)])


@pytest.fixture
def grammars(model: Path) -> Grammars:
    return Grammars(str(model), 512)


async def test_commands_of_a_group_wait_until_it_is_posted_and_others_do_not(grammars: Grammars) -> None:
    compiling, heard = Compiling(grammars), list[str]()
    constrained = group(1, "[a-z]+")
    compiling.run(constrained, lambda: heard.append("post 1"), lambda: heard.append("refuse 1"))
    compiling.after(1, lambda: heard.append("cancel sample of 1"))
    compiling.after(1, lambda: heard.append("cancel 1"))
    compiling.run(group(2, None), lambda: heard.append("post 2"), lambda: heard.append("refuse 2"))
    compiling.after(2, lambda: heard.append("cancel 2"))
    assert heard == ["post 2", "cancel 2"]
    while len(heard) < 5:
        await asyncio.sleep(0.01)
    assert heard[2:] == ["post 1", "cancel sample of 1", "cancel 1"]
    assert constrained.sequences[0].grammar is not None
    compiling.run(group(3, "[a-z]+"), lambda: heard.append("post 3"), lambda: heard.append("refuse 3"))
    assert heard[-1] == "post 3", "what is compiled does not wait"


async def test_a_grammar_that_cannot_be_compiled_is_refused_and_a_closed_session_posts_nothing(
    grammars: Grammars,
) -> None:
    compiling, heard = Compiling(grammars), list[str]()
    compiling.run(group(1, "((("), lambda: heard.append("post"), lambda: heard.append("refuse"))
    while not heard:
        await asyncio.sleep(0.01)
    assert heard == ["refuse"]
    compiling.run(group(2, "b+"), lambda: heard.append("post"), lambda: heard.append("refuse"))
    compiling.close()
    await asyncio.sleep(0.2)
    assert heard == ["refuse"]


def test_compiled_grammars_are_bounded_and_the_last_used_stay(grammars: Grammars) -> None:
    def attach(number: int) -> None:
        grammars.attach(group(number, f"a{{{number}}}").sequences)

    for number in range(1, MAX_COMPILED + 1):
        attach(number)
    attach(1)
    attach(MAX_COMPILED + 1)
    assert len(grammars) == MAX_COMPILED
    assert grammars.attach_known(group(0, "a{1}").sequences)
    assert not grammars.attach_known(group(0, "a{2}").sequences)


def test_long_outputs_are_replayed_in_the_thread(grammars: Grammars) -> None:
    grammars.attach(group(1, "a*").sequences)
    again = group(2, "a*")
    again.sequences[0].output_ids = [69] * 100
    assert not grammars.attach_known(again.sequences)


def test_a_grammar_that_becomes_too_complex_costs_only_its_group(
    ordinary: DecodeBench, grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    for handle, pattern in ((1, None), (2, "[a-z]{30}"), (3, None)):
        made = ordinary.prefilled(handle, PROMPT, sampling(None), STOPPING)
        for sequence in made.group.sequences:
            sequence.sampling = sampling(pattern)
            if pattern is not None:
                answer = ordinary.inbox.answers[handle][0]
                answer.token_ids[:] = sequence.output_ids[:] = [69]
                grammars.attach([sequence])
        ordinary.worker.submit(ordinary.inbox.session, *made)
    for _ in range(3):
        ordinary.worker.step()
    assert not ordinary.inbox.rejections and len(ordinary.inbox.answers[2][0].token_ids) > 1
    monkeypatch.setattr(grammar_state, "MAX_MASK_CPU_S", 0.0)
    ordinary.run()
    assert ordinary.inbox.rejections == {2: Rejection.GRAMMAR}
    for handle in (1, 3):
        assert ordinary.inbox.answers[handle][0].finish_reason is FinishReason.LENGTH


def test_a_group_whose_grammar_was_refused_leaves_nothing(ordinary: DecodeBench) -> None:
    made = ordinary.prefilled(5, PROMPT, sampling(None), STOPPING)
    ordinary.worker.refuse(ordinary.inbox.session, made.group, made.ticket)
    assert ordinary.inbox.rejections == {5: Rejection.GRAMMAR}
    ordinary.run()


async def test_what_a_gateway_should_not_send_reaches_the_worker_which_rejects_it(grammars: Grammars) -> None:
    """The invalid submits are a group without sequences, and two groups with the same handle."""
    compiling, heard = Compiling(grammars), list[str]()
    compiling.run(Group(1, 0, []), lambda: heard.append("empty"), lambda: heard.append("refused"))
    for name in ("first", "second"):
        compiling.run(group(2, f"{name}[a-z]+"), lambda name=name: heard.append(name), lambda: heard.append("refused"))
    compiling.after(2, lambda: heard.append("cancel"))
    tasks = list(compiling._tasks)
    await asyncio.gather(*tasks)
    assert len(tasks) == 2 and sorted(heard) == ["cancel", "empty", "first", "second"]
