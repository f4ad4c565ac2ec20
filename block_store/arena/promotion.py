"""Moves an arena from small pages into huge ones while workers use it.

An arena is created in small pages, which are cleared when they are first written. Huge pages are cleared when they are
allocated; for 4 GiB, this would delay the first request by a second.
"""

from __future__ import annotations

import errno
import logging
import threading
import time

from block_store.arena.huge_pages import PAGE_BYTES, collapse
from common.telemetry import Fallbacks

_LOG = logging.getLogger(__name__)
_PIECE_BYTES = 8 << 20
_REST = 9
"""Pause after each piece, as a multiple of the time that the piece took. Workers need the cores."""


class Promotion:
    """A thread that moves the pages of a file, from the first one to the last one, at a tenth of the speed of a core.
    It ends when all pages are huge, the system refuses, or `stop` is called.
    """

    def __init__(self, mapping: memoryview) -> None:
        """Starts the thread. `mapping` is the whole file, as `map_file` has mapped it."""
        self._mapping = mapping
        self._fallbacks = Fallbacks(_LOG)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="huge-pages", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        last = len(self._mapping) // PAGE_BYTES * PAGE_BYTES
        for first in range(0, last, _PIECE_BYTES):
            began = time.monotonic()
            try:
                collapse(self._mapping, first, min(first + _PIECE_BYTES, last))
            except OSError as error:
                if error.errno != errno.EAGAIN:  # EAGAIN: a page was in use, for example by a write to disk
                    self._fallbacks.note("arena in small pages", error.strerror or str(error))
                    return
            if self._stopped.wait(_REST * (time.monotonic() - began)):
                return

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped.set()
        self.join()

    def join(self) -> None:
        """Waits until the thread has ended."""
        self._thread.join()
