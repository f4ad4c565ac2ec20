"""Fair locks for threads and processes that take turns on the same cores."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections import deque
from pathlib import Path
from types import TracebackType

from common.telemetry import Fallbacks

logger = logging.getLogger("turns")
PATIENCE_S = 2.0
"""Time in seconds for which a step waits for its turn."""
_POLL_S = 0.001
_TURN, _NEXT = 0, 1
"""The bytes of the file that are locked. A process waits for the first byte while it holds the second one. The process
that has just stepped must therefore let the process that holds the second byte step first.
"""
_COUNT_BYTES = 8


class FairLock:
    """A fair lock for threads. `with lock:` waits for all threads that requested the lock earlier. A `threading.Lock`
    is not fair: the thread that has just released it usually gets it again.

    If a step is long, or its thread waits for another service, the others wait for `patience_s` seconds, and then step
    out of turn until a turn is given back. This is safe, because only speed depends on turns.
    """

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._changed = threading.Condition()
        self._line: deque[int] = deque()
        """The threads that have requested the lock and not given it back, in order. The first one has the lock."""
        self._out_of_turn: set[int] = set()
        """The threads that are stepping out of turn."""
        self._num_given_back = 0
        self._passed_by_at: int | None = None
        """`_num_given_back` when a thread last stepped out of turn."""
        self._patience_s = patience_s
        self.waited_s = 0.0
        """Time in seconds that the thread which has the lock waited for it, or for `patience_s` to pass."""
        self.fallbacks = Fallbacks(logger)
        """Counter of the steps out of turn, under the name "turn"."""

    @property
    def num_waiting(self) -> int:
        """Number of threads that are waiting."""
        with self._changed:
            return max(0, len(self._line) - 1)

    def __enter__(self) -> None:
        me, began = threading.get_ident(), time.monotonic()
        with self._changed:
            self._line.append(me)
            is_stuck = self._passed_by_at == self._num_given_back
            if not self._changed.wait_for(lambda: self._line[0] == me, 0.0 if is_stuck else self._patience_s):
                self._line.remove(me)
                self._out_of_turn.add(me)
                self._passed_by_at = self._num_given_back
                self.fallbacks.note("turn", f"another role has had the cores for {self._patience_s} s; stepping beside")
            self.waited_s = time.monotonic() - began

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            if (me := threading.get_ident()) in self._out_of_turn:
                self._out_of_turn.remove(me)
                return
            self._line.popleft()
            self._num_given_back += 1
            self._changed.notify_all()


class FairFileLock:
    """A fair lock between processes on the same cores, for one thread of each process. It locks two bytes of a file.

    The process that is next in line precedes the process that has just stepped. When a process dies, the kernel
    releases its lock. If a process is frozen or its step is long, the others wait for `patience_s` seconds, and then
    step out of turn until a turn is given back. This is safe, because only speed depends on turns.
    """

    def __init__(self, path: Path, patience_s: float = PATIENCE_S) -> None:
        """Opens the file `path`, and creates it if it does not exist. Raises OSError if that fails. The process must
        not open the file a second time, because closing any of its descriptors releases the process's locks.
        """
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._patience_s = patience_s
        self._has_turn = False
        self.waited_s = 0.0
        """Time in seconds that this process waited for its latest turn, or for `patience_s` to pass."""
        self._passed_by_at: int | None = None
        """Number of turns given back by all processes when this process last stepped out of turn, or None if it has had
        its turn since then.
        """
        self.fallbacks = Fallbacks(logger)
        """Counter of the steps out of turn, under the name "turn"."""

    def __enter__(self) -> None:
        stuck = self._passed_by_at == self._num_given_back()
        deadline = (began := time.monotonic()) + (0.0 if stuck else self._patience_s)
        self._has_turn = self._lock(_NEXT, deadline) and self._lock(_TURN, deadline)
        self._unlock(_NEXT)
        self.waited_s = time.monotonic() - began
        if self._has_turn:
            self._passed_by_at = None
            return
        self._passed_by_at = self._num_given_back()
        self.fallbacks.note("turn", f"another process has had the cores for {self._patience_s} s; stepping beside it")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._has_turn:
            os.pwrite(self._fd, (self._num_given_back() + 1).to_bytes(_COUNT_BYTES, "little"), 0)
            self._unlock(_TURN)

    def _num_given_back(self) -> int:
        """Returns the number of turns that all processes have given back. The number is the content of the file, which
        only the process that has the turn writes.
        """
        return int.from_bytes(os.pread(self._fd, _COUNT_BYTES, 0), "little")

    def _lock(self, byte: int, deadline: float) -> bool:
        while True:
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
                return True
            except (BlockingIOError, PermissionError):
                if time.monotonic() >= deadline:
                    return False
                time.sleep(_POLL_S)

    def _unlock(self, byte: int) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, byte)


AnyFairLock = FairLock | FairFileLock
