"""Passes items from a step thread to an event loop, while the step thread keeps the interpreter lock.

`loop.call_soon_threadsafe` gives up the lock in order to wake the loop. The loop's thread then takes it and sends the
tokens of the last step first, and the step thread waits for the lock, although its next forward pass would not need it.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import weakref
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
_write = ctypes.PyDLL(None).write  # a PyDLL's functions keep the interpreter lock, unlike os.write
_write.argtypes, _write.restype = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t], ctypes.c_ssize_t


class LoopInbox(Generic[T]):
    """An inbox of the running event loop. Any thread may put items into it."""

    def __init__(self, take: Callable[[T], object]) -> None:
        """Creates an inbox. `take` is called in the event loop with each item, in order, until `close`."""
        self._take = take
        self._items: deque[T] = deque()
        self._is_ringing = False
        """Whether the loop has been woken, and has not yet begun to take the items."""
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
            weakref.finalize(self, os.close, end)  # not in `close`, after which another thread may still write
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pipe[0], self._take_all)

    def put(self, item: T) -> None:
        """Adds an item, and wakes the loop. Does nothing useful after `close`."""
        self._items.append(item)
        if not self._is_ringing:
            self._is_ringing = True
            _write(self._pipe[1], b"\0", 1)  # if the pipe is full, the loop is awake anyway

    def close(self) -> None:
        """Stops taking items. Must be called in the event loop."""
        self._loop.remove_reader(self._pipe[0])

    def _take_all(self) -> None:
        os.read(self._pipe[0], 64)
        self._is_ringing = False  # before the items are taken, so that a later item wakes the loop again
        while self._items:
            self._take(self._items.popleft())
