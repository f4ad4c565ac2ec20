"""Fair locks for threads and processes that take turns on the same cores."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import select
import struct
import threading
import time
from collections import deque
from pathlib import Path
from types import TracebackType

from common.telemetry import Fallbacks

logger = logging.getLogger("turns")
PATIENCE_S = 2.0
"""Time in seconds for which a step waits for its turn."""
_POLL_S = 0.02
"""Time in seconds after which a process tries a lock again without having been told that it is free. The process that
had it may be dead.
"""
_WORK = 2
"""The byte of the file that is locked, for reading, by all processes that have work."""
_COUNT_BYTES = 8
_FLOCK = struct.Struct("hhqqi4x")
"""`struct flock` of 64-bit Linux: type, whence, start, length, process id."""


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
        self._with_work: set[int] = set()
        self.fallbacks = Fallbacks(logger)
        """Counter of the steps out of turn, under the name "turn"."""

    def note_work(self, has_work: bool) -> None:
        """Records whether this thread has work, and so is about to ask for its next turn."""
        (self._with_work.add if has_work else self._with_work.discard)(threading.get_ident())

    @property
    def others_have_work(self) -> bool:
        """Whether another thread has recorded that it has work."""
        return not self._with_work <= {threading.get_ident()}

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


class _Byte:
    """A byte of a file, which one process at a time locks. A named pipe tells the process that waits for the byte when
    it becomes free.
    """

    def __init__(self, path: Path, fd: int, position: int) -> None:
        pipe = path.with_name(f"{path.name}.{position}")
        with contextlib.suppress(FileExistsError):
            os.mkfifo(pipe, 0o600)
        self._fd, self._position = fd, position
        self._pipe = os.open(pipe, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._told = select.poll()
        self._told.register(self._pipe, select.POLLIN)

    def lock(self, deadline: float) -> bool:
        """Returns False if another process still has the lock when `time.monotonic()` reaches `deadline`."""
        while not self._try_lock():
            if (left := deadline - time.monotonic()) <= 0.0:
                return False
            if self._told.poll(1e3 * min(left, _POLL_S)):
                with contextlib.suppress(BlockingIOError):
                    os.read(self._pipe, 4096)
        return True

    def unlock(self) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, self._position)
        with contextlib.suppress(BlockingIOError):  # full, which wakes a process as well
            os.write(self._pipe, b".")

    def _try_lock(self) -> bool:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._position)
        except (BlockingIOError, PermissionError):
            return False
        return True


class FairFileLock:
    """A fair lock between processes on the same cores, for one thread of each process. It locks bytes of a file.

    A process waits for its turn while it is the next one in line, so the process that has just stepped lets it step
    first. When a process dies, the kernel releases its locks. If a process is frozen or its step is long, the others
    wait for `patience_s` seconds, and then step out of turn until a turn is given back. This is safe, because only
    speed depends on turns.
    """

    def __init__(self, path: Path, patience_s: float = PATIENCE_S) -> None:
        """Opens the file `path` and two named pipes beside it, and creates what does not exist. Raises OSError if that
        fails. The process must not open the file a second time, because closing any of its descriptors releases the
        process's locks.
        """
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._turn, self._next = _Byte(path, self._fd, 0), _Byte(path, self._fd, 1)
        self._patience_s = patience_s
        self._has_turn = False
        self._has_work = False
        self.waited_s = 0.0
        """Time in seconds that this process waited for its latest turn, or for `patience_s` to pass."""
        self._passed_by_at: int | None = None
        """Number of turns given back by all processes when this process last stepped out of turn, or None if it has had
        its turn since then.
        """
        self.fallbacks = Fallbacks(logger)
        """Counter of the steps out of turn, under the name "turn"."""

    def note_work(self, has_work: bool) -> None:
        """Records whether this process has work, and so is about to ask for its next turn."""
        if has_work != self._has_work:
            fcntl.lockf(self._fd, fcntl.LOCK_SH if has_work else fcntl.LOCK_UN, 1, _WORK)
            self._has_work = has_work

    @property
    def others_have_work(self) -> bool:
        """Whether another process has recorded that it has work."""
        wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _WORK, 1, 0)
        kind: int = _FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_GETLK, wanted))[0]
        return kind != fcntl.F_UNLCK

    def __enter__(self) -> None:
        stuck = self._passed_by_at == self._num_given_back()
        deadline = (began := time.monotonic()) + (0.0 if stuck else self._patience_s)
        if self._next.lock(deadline):
            self._has_turn = self._turn.lock(deadline)
            self._next.unlock()
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
            self._has_turn = False
            os.pwrite(self._fd, (self._num_given_back() + 1).to_bytes(_COUNT_BYTES, "little"), 0)
            self._turn.unlock()

    def _num_given_back(self) -> int:
        """Returns the number of turns that all processes have given back. The number is the content of the file, which
        only the process that has the turn writes.
        """
        return int.from_bytes(os.pread(self._fd, _COUNT_BYTES, 0), "little")


AnyFairLock = FairLock | FairFileLock
