"""The three arms of a run: undisturbed, with decode workers killed midway, and with too few blocks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from testing.chaos.pressure import RESUMED, SWAPPED
from testing.chaos.stack import BACK_S, Plan, Stack
from testing.schemas.answers import MAX_TOKENS, Answer, Questions

MAX_MODEL_LEN = MAX_TOKENS + 200
_ROOMY = Plan(num_blocks=4096, max_model_len=MAX_MODEL_LEN)
_TIGHT = Plan(num_blocks=404, max_model_len=MAX_MODEL_LEN, block_size=4, workers=1, preemption="swap")
"""A plan with slightly more blocks than the sum of the two workers' floors, each of which is about the 200 blocks of
the longest sequence. 32 prompts of about 125 tokens need more blocks than this.
"""
_MIDWAY_AT_KILL = 4
"""The number of answers that must have begun, but not ended, before a worker is killed."""


@dataclass(frozen=True, slots=True)
class Arm:
    """The deployment of one arm, the number of concurrent requests, and whether workers are killed."""

    plan: Plan = _ROOMY
    at_once: int = 8
    """The maximum number of concurrent requests."""
    kills: bool = False


ARMS: Mapping[str, Arm] = {"plain": Arm(), "kill": Arm(at_once=24, kills=True), "swap": Arm(_TIGHT, at_once=32)}


@dataclass(slots=True)
class Result:
    """The answers of one arm, and how often it was disturbed."""

    answers: Sequence[Answer]
    kills: list[float] = field(default_factory=list)
    """The times of the kills."""
    num_swaps: int = 0
    num_resumed: int = 0

    @property
    def num_spanning(self) -> int:
        """The number of answers that began before a kill, ended after the kill, and were prefilled again."""
        return sum(a.attempts > 1 and any(map(a.spans, self.kills)) for a in self.answers)


def run(arm: Arm, stack: Stack, schemas: Sequence[Mapping[str, Any]]) -> Result:
    """Requests an answer for each schema on a stack that has the arm's plan."""
    questions, began = Questions(schemas), time.monotonic()
    result = Result(questions.answers)
    with _killing(stack, questions, result.kills) if arm.kills else _undisturbed():
        questions.ask_all(stack.addresses.http, arm.at_once)
    result.num_swaps = len(stack.lines(SWAPPED, since=began))
    result.num_resumed = len(stack.lines(RESUMED, since=began))
    return result


@contextmanager
def _undisturbed() -> Iterator[None]:
    yield


@contextmanager
def _killing(stack: Stack, questions: Questions, kills: list[float]) -> Iterator[None]:
    """Kills decode workers, in turn, while the body of the `with` statement runs. Adds the times to `kills`."""
    over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(_kill_until, over, stack, questions, kills)
        try:
            yield
        finally:
            over.set()
        killing.result()


def _kill_until(over: threading.Event, stack: Stack, questions: Questions, kills: list[float]) -> None:
    for name in cycle(("decode-0", "decode-1")):
        while questions.num_midway < _MIDWAY_AT_KILL:
            if over.wait(0.005):
                return
        dead = stack.pids[name]
        kills.append(stack.kill(name))
        _wait_ready(over, stack, name, dead)


def _wait_ready(over: threading.Event, stack: Stack, name: str, dead: int) -> None:
    """Waits until the successor of the process `dead` is ready, or until the run is over. Raises TimeoutError after
    BACK_S.
    """
    deadline = time.monotonic() + BACK_S
    while not over.wait(0.05):
        if stack.pids[name] != dead and stack.launcher.is_ready(name):
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name} is not ready within {BACK_S:.0f} s of its death")
