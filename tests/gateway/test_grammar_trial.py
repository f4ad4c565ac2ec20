"""Trials of grammars in a separate process: hostile grammars get a 400 for less than a second of CPU time, and other
requests do not wait."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from common.errors import Internal, InvalidArgument
from common.types import StructuredOutput
from gateway.intake.grammar_trial import MAX_VERDICTS, GrammarTrials

MODEL = str(Path(__file__).parents[2] / "models/storyteller")
GOOD = StructuredOutput("json_object")
HOSTILE = {
    "crashes the compiler": StructuredOutput(
        "lark", "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(4000)) + '\nr4000: "a"'
    ),
    "long chain of terminals": StructuredOutput(
        "lark", "start: R0\n" + "\n".join(f'R{i}: R{i + 1} "b"' for i in range(3000)) + '\nR3000: "a"'
    ),
    "takes seconds to compile": StructuredOutput(
        "json_schema", '{"type": "integer", "multipleOf": 999983, "minimum": 0, "maximum": 1000000000000000000}'
    ),
    "takes seconds for a mask": StructuredOutput("lark", "start: " + " | ".join(['"a"'] * 12000)),
    "takes seconds later": StructuredOutput("regex", "(a{1000}){1000}"),
    "takes memory": StructuredOutput("regex", "((((((a{99}){99}){99}){99}b){99}){99})"),
    "nested": StructuredOutput("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000),
}


@pytest.fixture
async def trials() -> AsyncIterator[GrammarTrials]:
    made = GrammarTrials(MODEL, 2048)
    await made.warm()
    await made.check("x", GOOD)
    yield made
    await made.close()


async def refusal(trials: GrammarTrials, wanted: StructuredOutput) -> str:
    with pytest.raises(InvalidArgument) as caught:
        await trials.check("guided_grammar", wanted)
    assert caught.value.violations[0].field == "guided_grammar"
    return caught.value.message


def cpu_s(trials: GrammarTrials) -> float:
    """Returns the CPU time of the trial process and of its children that have ended."""
    assert trials._process is not None
    stat = Path(f"/proc/{trials._process._child.pid}/stat").read_text()
    return sum(map(int, stat.rpartition(")")[2].split()[11:15])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_grammars_are_refused_within_a_second_of_cpu_time(trials: GrammarTrials, name: str) -> None:
    before = cpu_s(trials)
    message = await refusal(trials, HOSTILE[name])
    assert cpu_s(trials) - before < 1.0
    assert message.isprintable()
    await trials.close()
    assert await refusal(trials, HOSTILE[name]) == message
    assert trials._process is not None and trials._process.has_ended, "the verdict is kept"
    await trials.check("x", StructuredOutput("regex", "a+"))


async def test_others_go_on_meanwhile(trials: GrammarTrials) -> None:
    """The event loop stays free, known grammars are answered at once, and a new grammar waits only for a free trial."""
    slow = HOSTILE["takes seconds to compile"].source
    hostile = [asyncio.create_task(refusal(trials, StructuredOutput("json_schema", slow + " " * i))) for i in range(3)]
    await asyncio.sleep(0)
    await trials.check("x", GOOD)
    assert not any(task.done() for task in hostile)
    worst = 0.0
    while not all(task.done() for task in hostile):
        began = time.thread_time()
        await asyncio.sleep(0.001)
        worst = max(worst, time.thread_time() - began)
    assert worst < 0.1
    assert all("0.15 s" in message for message in await asyncio.gather(*hostile))


async def test_a_process_that_dies_is_replaced(trials: GrammarTrials) -> None:
    assert trials._process is not None
    trials._process._child.kill()
    await trials.check("x", StructuredOutput("regex", "abc"))


async def test_a_trial_that_fails_is_answered_and_logged(
    trials: GrammarTrials, capfd: pytest.CaptureFixture[str]
) -> None:
    """A failure is not the grammar's fault, so it is not kept as a verdict."""
    await trials.close()  # the next process logs to `capfd`
    unusable = StructuredOutput("regex", None)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(Internal, match="could not be tried"):
            await trials.check("x", unusable)
        logged = capfd.readouterr().err
        assert "a grammar could not be tried" in logged and "TypeError" in logged
    await trials.check("x", StructuredOutput("regex", "abc"))


async def test_the_same_grammar_is_tried_once(trials: GrammarTrials) -> None:
    wanted = StructuredOutput("regex", "once")
    await asyncio.gather(*(trials.check("x", wanted) for _ in range(50)))
    assert next(trials._process._numbers) == 2  # type: ignore[union-attr]


async def test_verdicts_are_bounded(trials: GrammarTrials) -> None:
    for i in range(MAX_VERDICTS + 10):
        trials._keep(i.to_bytes(4), None)
    assert len(trials._verdicts) == MAX_VERDICTS


async def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    trials = GrammarTrials(str(tmp_path), 2048)
    assert "tokenizer" in await refusal(trials, GOOD)
    await trials.close()
