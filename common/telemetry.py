"""Sets up the logs of a service, and counts its fallbacks. A line that a request's task logs contains the request's id.
A JSON line also has the service's name, and the trace's id if there is one.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Generic, Literal, TypeVar

from common.request_ids import REQUEST_ID
from common.tracing import CURRENT

LogFormat = Literal["text", "json"]
LOG_EVERY_S = 60.0
T = TypeVar("T")
_LOCK = threading.Lock()
_COUNTS: Counter[str] = Counter()
_SOURCES: list[Callable[[], Mapping[str, int]]] = []


class _JsonFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self.service = service

    def format(self, record: logging.LogRecord) -> str:
        more = {"logger": record.name}
        if request_id := REQUEST_ID.get():
            more["request_id"] = request_id
        if trace_id := CURRENT.get().trace_id:
            more["trace_id"] = trace_id
        if record.exc_info:
            more["exception"] = self.formatException(record.exc_info)
        return json_line(self.service, record.getMessage(), record.created, record.levelname.lower(), **more)


class _LineFormatter(logging.Formatter):
    """A formatter of plain lines. In an event without an exception, unprintable characters are escaped, so that the
    event stays on one line.
    """

    def format(self, record: logging.LogRecord) -> str:
        request_id = REQUEST_ID.get()
        record.of_request = f"[{request_id}] " if request_id else ""
        text = super().format(record)
        if record.exc_info:
            return text
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def json_line(service: str, message: str, created_s: float, level: str, **more: str) -> str:
    """Returns a log line in JSON. `created_s` is the Unix time of the event."""
    milliseconds = int(created_s % 1 * 1000)
    created = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(created_s)) + f".{milliseconds:03d}Z"
    return json.dumps({"time": created, "level": level, "service": service, "message": message, **more})


def configure_logging(level: str = "INFO", log_format: LogFormat = "text", *, service: str = "") -> None:
    """Sets up the root logger of a process. `service` is the name of the process in JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(_JsonFormatter(service))
    else:
        handler.setFormatter(
            _LineFormatter("%(asctime)s %(levelname)-7s %(name)s: %(of_request)s%(message)s", "%H:%M:%S")
        )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def log_format_of(root: logging.Logger) -> LogFormat:
    """Returns the format that `configure_logging` has set up, for processes that this one starts."""
    return "json" if any(isinstance(handler.formatter, _JsonFormatter) for handler in root.handlers) else "text"


class Fallbacks:
    """A counter of fallbacks by name. It logs each name at most once in LOG_EVERY_S seconds."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._logged_at: dict[str, float] = {}
        self.counts: dict[str, int] = {}

    def note(self, name: str, reason: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1
        with _LOCK:
            _COUNTS[name] += 1
        now = time.monotonic()
        if now - self._logged_at.get(name, -LOG_EVERY_S) >= LOG_EVERY_S:
            self._logged_at[name] = now
            self._logger.warning("fallback %s: %s (%d so far)", name, reason, self.counts[name])


class Burst(Generic[T]):
    """A collector of items that arrive in bursts. It makes one call per burst, with all items of the burst, for example
    to log them. Callers of `note` do not wait for this call.
    """

    def __init__(self, tell: Callable[[list[T]], object], wait_s: float = 1.0) -> None:
        """`tell` is called in a separate thread, `wait_s` after the first item of a burst."""
        self._tell = tell
        self._wait_s = wait_s
        self._lock = threading.Lock()
        self._items: list[T] = []

    def note(self, item: T) -> None:
        with self._lock:
            self._items.append(item)
            is_first = len(self._items) == 1
        if is_first:
            timer = threading.Timer(self._wait_s, self._over)
            timer.daemon = True
            timer.start()

    def _over(self) -> None:
        with self._lock:
            items, self._items = self._items, []
        self._tell(items)


def fallback_counts() -> dict[str, int]:
    """Returns how often this process has used each fallback, by name."""
    with _LOCK:
        total = Counter(_COUNTS)
    for source in _SOURCES:
        total.update(source())
    return dict(total)


def count_fallbacks_of(source: Callable[[], Mapping[str, int]]) -> None:
    """Makes `fallback_counts` include the counts that `source` returns. Adding the same source again has no effect."""
    if source not in _SOURCES:
        _SOURCES.append(source)
