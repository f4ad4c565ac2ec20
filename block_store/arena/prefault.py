"""Allocates the shared memory of an arena, usually while workers load their model, because allocating 4 GiB in small
pages takes seconds of CPU time.

The file gets a name only when it becomes an arena, so a store that is killed earlier leaves no file behind.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

_LOG = logging.getLogger(__name__)
_PIECE_BYTES = 4 << 20
"""Number of bytes allocated by one call. Once the store knows the size, it waits for at most one call."""


class Prefault:
    """A background allocation of memory. It ends when `most_bytes` are allocated, no more memory is available, or
    `stop` is called.
    """

    def __init__(self, directory: Path, most_bytes: int) -> None:
        """Creates an unnamed file, and starts the thread that allocates its memory. Raises OSError if the file system
        of `directory` does not support unnamed files.
        """
        self._fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o660)
        self._most_bytes = most_bytes
        self._known = threading.Event()
        self.num_bytes = 0
        """Number of bytes allocated so far."""
        self._thread = threading.Thread(target=self._take, name="memory-ahead", daemon=True)
        self._thread.start()

    def _take(self) -> None:
        if not self._most_bytes:
            return  # at once: with idle priority, it might wait for a core
        try:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # this thread only: model loading comes first
        except OSError as error:
            _LOG.info("shared memory is allocated without idle priority: %s", error.strerror)
        while not self._known.is_set() and self.num_bytes < self._most_bytes:
            size = min(_PIECE_BYTES, self._most_bytes - self.num_bytes)
            try:
                os.posix_fallocate(self._fd, self.num_bytes, size)
            except OSError as error:  # if the arena needs more, its creation raises the error
                _LOG.info(
                    "only %d bytes of shared memory were allocated in advance: %s", self.num_bytes, error.strerror
                )
                return
            self.num_bytes += size

    def stop(self) -> None:
        """Stops allocating memory; returns when the thread has ended."""
        self._known.set()
        self._thread.join()

    def become(self, path: Path, head: bytes, size: int) -> None:
        """Turns the memory into the file `path` of `size` bytes. All of the file is allocated; after `head`, it
        contains zeros.

        Call `stop` first. Raises FileExistsError, or OSError if there is not enough memory.
        """
        if size > self.num_bytes:
            os.posix_fallocate(self._fd, self.num_bytes, size - self.num_bytes)
        os.ftruncate(self._fd, size)
        os.pwrite(self._fd, head, 0)
        # A directory descriptor, ignored with an absolute path, makes this linkat, which follows the link in /proc.
        os.link(f"/proc/self/fd/{self._fd}", path.absolute(), src_dir_fd=self._fd)

    def close(self) -> None:
        """Frees the memory, unless it has become a file."""
        self.stop()
        os.close(self._fd)
