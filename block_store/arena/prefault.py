"""Shared memory for an arena, taken while workers still load their model: 4 GiB in small pages cost seconds of a core.

The file gets a name only when an arena is made of it, so a store that is killed leaves nothing behind. Independent of
headers.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

_LOG = logging.getLogger(__name__)
_PIECE_BYTES = 4 << 20
"""Taken in one call; a store that is told the size waits for one of them at most."""


class Prefault:
    """Takes memory in a thread, until it has `most_bytes`, there is no more, or the size is known."""

    def __init__(self, directory: Path, most_bytes: int) -> None:
        """OSError: the file system of `directory` has no files without a name."""
        self._fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o660)
        self._most_bytes = most_bytes
        self._known = threading.Event()
        self.num_bytes = 0
        """Taken so far."""
        self._thread = threading.Thread(target=self._take, name="memory-ahead", daemon=True)
        self._thread.start()

    def _take(self) -> None:
        try:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # this thread's: loading a model comes first
        except OSError as error:
            _LOG.info("shared memory is taken beside what loads, not after it: %s", error.strerror)
        while not self._known.is_set() and self.num_bytes < self._most_bytes:
            size = min(_PIECE_BYTES, self._most_bytes - self.num_bytes)
            try:
                os.posix_fallocate(self._fd, self.num_bytes, size)
            except OSError as error:  # the maker of the arena gets the error, if it needs more
                _LOG.info("no more than %d bytes of shared memory ahead: %s", self.num_bytes, error.strerror)
                return
            self.num_bytes += size

    def stop(self) -> None:
        """Take no more; returns when that is so."""
        self._known.set()
        self._thread.join()

    def become(self, path: Path, head: bytes, size: int) -> None:
        """Make it the file `path` of `size` bytes, zeros but for `head`, all its memory there; after `stop`.

        Errors: FileExistsError; OSError (no memory).
        """
        if size > self.num_bytes:
            os.posix_fallocate(self._fd, self.num_bytes, size - self.num_bytes)
        os.ftruncate(self._fd, size)
        os.pwrite(self._fd, head, 0)
        # A directory's descriptor, ignored beside an absolute path, makes it linkat, which follows the link in /proc.
        os.link(f"/proc/self/fd/{self._fd}", path.absolute(), src_dir_fd=self._fd)

    def close(self) -> None:
        """Give the memory back, unless it has become a file."""
        self.stop()
        os.close(self._fd)
