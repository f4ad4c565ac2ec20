"""Runs closed-loop clients in a separate thread and records the outcome of every request."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from looseleaf.client import AsyncClient
from testing.chaos.book import Case

DRAIN_S = 90.0
"""The maximum time in seconds to wait for requests in flight at the end."""
NUM_SALTS = 3
"""The number of shared cache salts. If prefixes are shared, a random quarter of the requests use a unique salt instead,
so that some prefixes are cached and some are not.
"""
REFUSED_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Answer:
    """A record of one request. Times are `time.monotonic()` values."""

    case: Case
    began: float
    ended: float
    num_tokens: int
    right: bool
    """Whether all received tokens match the oracle's, even if some are missing."""
    error: str | None
    """The reason why the request did not complete, or None if it completed."""
    longest_gap_s: float
    """The longest time between two messages of the same sample, in seconds. The request counts as the first message. If
    the request failed, its end counts as the last message.
    """
    transferred_tokens: int
    """The number of copied token positions, according to the answer. 0 if the request failed."""

    def spans(self, moment: float) -> bool:
        return self.began < moment < self.ended


class Traffic:
    """A group of closed-loop clients. Each client sends a request, waits for its end, and sends the next request, until
    `stop` is called.
    """

    def __init__(
        self,
        address: str,
        book: Sequence[Case],
        *,
        seed: int,
        concurrency: int = 16,
        shared: bool = True,
        priorities: Sequence[int] = (0,),
    ) -> None:
        """Sets up the clients. If `shared` is False, every request has a unique salt. Each request has a random
        priority from `priorities`.
        """
        self.answers: list[Answer] = []
        self._address = address
        self._book = book
        self._rng = random.Random(seed)
        self._concurrency = concurrency
        self._priorities = priorities
        self._share_of_own_salts = 0.25 if shared else 1.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="traffic")

    @property
    def num_complete(self) -> int:
        return sum(answer.error is None for answer in self.answers)

    def wait_for(self, num_answers: int, timeout_s: float) -> None:
        """Waits until the given total number of requests has ended. Raises TimeoutError after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while len(self.answers) < num_answers:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(self.answers)} of {num_answers} requests ended within {timeout_s:.0f} s")
            time.sleep(0.05)

    def stop(self) -> list[Answer]:
        """Stops sending, waits at most DRAIN_S for requests in flight, and returns all answers."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        return self.answers

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def _run(self) -> None:
        async with AsyncClient(self._address) as client:
            tasks = [asyncio.create_task(self._ask_on(client)) for _ in range(self._concurrency)]
            while not self._stopping.is_set():
                await asyncio.sleep(0.05)
            _, late = await asyncio.wait(tasks, timeout=DRAIN_S)
            for task in late:
                task.cancel()  # its answer is recorded as "unfinished"
            await asyncio.gather(*late, return_exceptions=True)

    async def _ask_on(self, client: AsyncClient) -> None:
        while not self._stopping.is_set():
            case = self._rng.choice(self._book)
            answer = await ask(client, case, self._salt(), self._rng.choice(self._priorities))
            self.answers.append(answer)
            if answer.error is not None:
                await asyncio.sleep(REFUSED_PAUSE_S)

    def _salt(self) -> str:
        own = self._rng.random() < self._share_of_own_salts
        return str(self._rng.getrandbits(60) if own else self._rng.randrange(NUM_SALTS))


async def ask(client: AsyncClient, case: Case, salt: str, priority: int = 0, timeout_s: float | None = None) -> Answer:
    """Sends one request and returns its outcome. If the request fails or the task is cancelled, the outcome has an
    `error`. `timeout_s` is the request's deadline.
    """
    began = time.monotonic()
    samples: list[list[int]] = [[] for _ in range(case.sampling.num_sequences)]
    last, longest, error, transferred = [began] * len(samples), 0.0, "unfinished", 0
    options = case.options(salt)
    options["priority"] = priority
    if timeout_s is not None:
        options["timeout"] = timeout_s
    try:
        async for delta in client.stream(list(case.prompt_ids), **options):
            samples[delta.index] += delta.token_ids
            now = time.monotonic()
            longest, last[delta.index] = max(longest, now - last[delta.index]), now
            transferred += delta.usage.transferred_tokens if delta.usage else 0
        error = _missing(samples, case)
    except asyncio.CancelledError:
        pass
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
    now = time.monotonic()
    if error:
        longest = max(longest, now - min(last))
    num_tokens = sum(map(len, samples))
    return Answer(case, began, now, num_tokens, _right(samples, case), error or None, longest, transferred)


def _missing(samples: Sequence[Sequence[int]], case: Case) -> str:
    """Returns a description of the tokens that are missing from a finished answer, or an empty string."""
    came, wanted = [len(tokens) for tokens in samples], [len(tokens) for tokens in case.expected]
    return "" if came == wanted else f"{came} of {wanted} tokens"


def _right(samples: Sequence[Sequence[int]], case: Case) -> bool:
    if not case.expected:
        return not any(samples)
    return all(tuple(a) == b[: len(a)] for a, b in zip(samples, case.expected, strict=True))
