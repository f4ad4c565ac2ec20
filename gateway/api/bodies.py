"""Reads request bodies, each within a limit and all together within a budget. Large bodies are parsed in a thread.

Parsing holds the interpreter lock, so more than one thread would be of no use. The limits of `openai_parse` bound the
time for one body. Bodies that wait for the thread count against the budget.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from starlette.requests import Request

from common.errors import ResourceExhausted
from gateway.api.asgi import read_body
from gateway.api.openai_parse import max_body_bytes, parse_body
from gateway.api.openai_request import Body
from gateway.api.unknown_fields import UnknownFields
from gateway.intake.limits import PromptLimits

M = TypeVar("M", bound=Body)
INLINE_BYTES = 64 << 10
"""Bodies larger than this are parsed in a thread."""
RETRY_AFTER_S = 1.0


class BodyBudget:
    """A budget in bytes for the request bodies, of all connections, that are being received or parsed."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.in_flight = 0

    @contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """A context manager that yields a function for one body. The function takes a number of bytes from the budget,
        or raises ResourceExhausted if too few are left. Leaving the context returns the bytes.
        """
        taken = 0

        def take(num_bytes: int) -> None:
            nonlocal taken
            if self.in_flight + num_bytes > self._limit:
                raise ResourceExhausted(
                    f"the limit is {self._limit} bytes for all bodies being received or parsed (body_budget_bytes)",
                    retry_after_s=RETRY_AFTER_S,
                )
            self.in_flight += num_bytes
            taken += num_bytes

        try:
            yield take
        finally:
            self.in_flight -= taken


class BodyReader:
    """A reader that turns request bodies into typed bodies. `limits` returns the current limits of the model. Unknown
    top-level fields are refused if `strict` is set, and otherwise ignored with a warning.
    """

    def __init__(self, limits: Callable[[], PromptLimits], budget: BodyBudget, *, strict: bool = False) -> None:
        self._limits = limits
        self._budget = budget
        self._strict = strict
        self._unknown = UnknownFields()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bodies")

    async def read(self, request: Request, kind: type[M]) -> M:
        """Reads and parses one body. Raises the errors of `read_body` and `parse_body`, and ResourceExhausted if the
        budget has too few bytes left.
        """
        limits, unknown = self._limits(), list[str]()
        on_unknown = None if self._strict else unknown.append
        with self._budget.share() as take:
            raw = await read_body(request, max_body_bytes(kind, limits), take)
            if len(raw) <= INLINE_BYTES:
                body = parse_body(kind, raw, limits, on_unknown)
            else:
                loop = asyncio.get_running_loop()
                body = await loop.run_in_executor(self._thread, parse_body, kind, raw, limits, on_unknown)
        self._unknown.note(request.scope, unknown)
        return body
