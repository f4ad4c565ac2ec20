"""Passes items from a step thread to an event loop, while the step thread keeps the interpreter lock.

`loop.call_soon_threadsafe` gives up the lock in order to wake the loop. The loop's thread then takes it and sends the
results of the last step first, and the step thread waits for the lock before its next forward pass, which does not need
the lock.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import weakref
from collections import deque
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_write = ctypes.PyDLL(None).write  # a PyDLL's functions keep the interpreter lock, unlike os.write
_write.argtypes, _write.restype = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t], ctypes.c_ssize_t
_inboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopInbox] = weakref.WeakKeyDictionary()


def loop_inbox() -> LoopInbox:
    """Returns the inbox of the running event loop."""
    loop = asyncio.get_running_loop()
    if (inbox := _inboxes.get(loop)) is None:
        inbox = _inboxes[loop] = LoopInbox()
        inbox.join(loop)
    return inbox


class LoopInbox:
    """An inbox of one event loop. Any thread may put items into it, even after the loop has ended."""

    def __init__(self) -> None:
        self._items: deque[Callable[[], object]] = deque()
        self._is_ringing = False
        """Whether the loop has been woken, and has not yet begun to take the items."""
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
            weakref.finalize(self, os.close, end)  # not earlier: a thread may still write

    def join(self, loop: asyncio.AbstractEventLoop) -> None:
        """Makes the loop take the items."""
        loop.add_reader(self._pipe[0], self._take_all)

    def put(self, take: Callable[[T], object], item: T) -> None:
        """Makes the loop call `take(item)` soon. Calls are in the order of `put`."""
        self._items.append(lambda: take(item))
        if not self._is_ringing:
            self._ring()

    def _ring(self) -> None:
        self._is_ringing = True
        _write(self._pipe[1], b"\0", 1)  # if the pipe is full, the loop is awake anyway

    def _take_all(self) -> None:
        os.read(self._pipe[0], 64)
        self._is_ringing = False  # before the items are taken, so that a later item wakes the loop again
        try:
            while self._items:
                self._items.popleft()()
        finally:
            if self._items:  # after an error, which the loop reports
                self._ring()
