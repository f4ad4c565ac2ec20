"""The fast path of tokens to their client: written by the caller that brings them.

The ordinary way wakes the request's task and goes through its generators, which costs more than all the rest. It is
left only when there is nothing to decide: the task waits for outputs, or is about to, everything before is written, and
nothing but tokens of samples that go on has come. Independent of tokenizers, gRPC and HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Write = Callable[[T], Coroutine[Any, Any, None]]


class Direct(Generic[T]):
    """A stream's writes, one at a time: from the request's task by `write`, from the caller that brings tokens by
    `send`.
    """

    __slots__ = ("_error", "_in_flight", "_message", "_settled", "_write")

    def __init__(self, message: Callable[[int, Sequence[int], str], T | None], write: Write[T] | None = None) -> None:
        """`message(sample index, token ids, their text)` is what to write, None for nothing."""
        self._message = message
        self._write = write
        self._in_flight = False
        self._error: BaseException | None = None
        self._settled: asyncio.Future[None] | None = None

    def open(self, write: Write[T]) -> None:
        """Where to write, if that was not known from the start."""
        self._write = write

    @property
    def ready(self) -> bool:
        """Whether `send` may be called: the last write is done, and did not fail."""
        return not self._in_flight and self._error is None and self._write is not None

    def send(self, index: int, token_ids: Sequence[int], text: str) -> None:
        """Start to write tokens. If that fails, `write` or `settle` says so."""
        message = self._message(index, token_ids, text)
        if message is not None:
            assert self._write is not None
            self._in_flight = True
            self._step(self._write(message))

    async def write(self, message: T) -> None:
        """Write in turn. Errors: those of the writer, also of an earlier `send`."""
        await self.settle()
        assert self._write is not None
        await self._write(message)

    async def settle(self) -> None:
        """Wait until what was sent is written. Raises what `write` would."""
        while self._in_flight:
            self._settled = asyncio.get_running_loop().create_future()
            await self._settled
        if self._error is not None:
            raise self._error

    def _step(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run the writer until it waits for a future, and go on when that is done: what a task does, without one."""
        try:
            waits_for = coroutine.send(None)
        except StopIteration:
            self._over(None)
        except (Exception, asyncio.CancelledError) as error:
            self._over(error)
        else:
            if waits_for is None:  # it only wants others to run
                asyncio.get_running_loop().call_soon(self._step, coroutine)
                return
            waits_for._asyncio_future_blocking = False  # as `Task` does: it says that `await` was used
            waits_for.add_done_callback(lambda _: self._step(coroutine))

    def _over(self, error: BaseException | None) -> None:
        self._in_flight, self._error = False, error
        if self._settled is not None and not self._settled.done():
            self._settled.set_result(None)
