"""Writer slots, which are numbered lock files in a subdirectory of the arena's directory. A process keeps one of them
locked (flock) while it may write, as proof that it is alive.

An arena never uses a number twice. Otherwise, a block that a dead process was writing would stay in quarantine as long
as the next process with that number was alive. The kernel releases the lock when the process ends, for any reason. A
forked child shares the lock until it calls exec or ends.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_COUNTER = "next"


@dataclass(slots=True)
class WriterSlot:
    """A writer slot that this process holds. Once the slot is free, other processes assume that this process no longer
    writes to the arena, so close the slot only after the last write.
    """

    number: int
    _fd: int | None

    @property
    def is_open(self) -> bool:
        return self._fd is not None

    def fileno(self) -> int:
        """Returns the descriptor of the locked file. The slot stays locked while any process has a copy of the
        descriptor.
        """
        assert self._fd is not None, "the slot is closed"
        return self._fd

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class WriterSlots:
    """The directory of the writer slots of one arena."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def acquire(self) -> WriterSlot:
        """Returns a slot with the next number, whose file is locked. Removes the lock files of dead processes."""
        self._directory.mkdir(exist_ok=True)
        with self._counter() as counter:
            number = int(os.pread(counter, 20, 0) or b"1")
            fd = os.open(self._path(number), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o660)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)  # waits for a process that checks whether the slot is held
                os.pwrite(fd, str(os.getpid()).encode(), 0)
                os.pwrite(counter, str(number + 1).encode(), 0)
                for other in self.numbers():
                    if other != number and not self.is_alive(other):
                        self._path(other).unlink(missing_ok=True)
            except BaseException:
                os.close(fd)
                raise
        return WriterSlot(number, fd)

    def is_alive(self, number: int) -> bool:
        """Returns whether a process still holds the slot.

        Tries a shared lock, so that two callers do not mistake each other for the holder.
        """
        try:
            fd = os.open(self._path(number), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def numbers(self) -> list[int]:
        """Returns the numbers of all slots with a lock file, alive or not."""
        if not self._directory.is_dir():
            return []
        return sorted(int(path.stem) for path in self._directory.glob("*.lock"))

    def alive(self) -> list[int]:
        return [number for number in self.numbers() if self.is_alive(number)]

    def remove(self) -> None:
        """Removes all lock files and their directory, when the arena is removed."""
        for path in (*self._directory.glob("*.lock"), self._directory / _COUNTER):
            path.unlink(missing_ok=True)
        if self._directory.is_dir():
            self._directory.rmdir()

    def _path(self, number: int) -> Path:
        return self._directory / f"{number}.lock"

    @contextmanager
    def _counter(self) -> Iterator[int]:
        fd = os.open(self._directory / _COUNTER, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o660)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield fd
        finally:
            os.close(fd)
