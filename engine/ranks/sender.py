"""A thread that sends the results of a pipeline's rank, so that the rank can compute while the receiver is busy."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading

Data = bytes | memoryview


class Sender:
    """A queue of messages, and a thread that sends them in order. If a receiver is gone, the thread ends without an
    error.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[socket.socket, Data] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="sender", daemon=True).start()

    def send(self, to: socket.socket, data: Data) -> None:
        """Queues `data`, whose memory must not change after the call."""
        self._queue.put((to, data))

    def close(self) -> None:
        """Ends the thread after it has sent the queued messages."""
        self._queue.put(None)

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while (item := self._queue.get()) is not None:
                to, data = item
                to.sendall(data)
