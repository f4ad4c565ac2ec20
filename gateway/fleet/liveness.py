"""Decides from the messages and heartbeats on one stream whether a worker is alive (`worker.heartbeat` sends the
heartbeats).

If this process was stopped or its loop was busy for longer than `OWN_PAUSE_S`, the measurements begin anew, so that
this time does not count against the worker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

TICK_S = 0.25
OWN_PAUSE_S = 0.5
"""If a tick is late by more than this number of seconds, this process was stopped or its loop was busy."""


@dataclass(frozen=True, slots=True)
class LivenessLimits:
    """The limits on a worker's silence, in seconds."""

    silence_s: float = 2.25
    """Limit on the time without any message, even a heartbeat. Beyond it, the process is probably frozen or gone."""
    stall_s: float = 60.0
    """Limit on the time without a step while the worker has work from this gateway."""


class Liveness:
    """A timer that watches one worker from `start` to `stop`, in one event loop. When a limit has passed, the next tick
    calls `lost` with the limit in seconds and a description of the worker's failure, and ends the watch.
    """

    __slots__ = ("_busy", "_heard_at", "_limits", "_lost", "_stepped_at", "_tick_s", "_ticked_at", "_timer")

    def __init__(
        self,
        limits: LivenessLimits,
        lost: Callable[[float, str], None],
        busy: Callable[[], bool] = lambda: False,
    ) -> None:
        """`busy` returns whether the worker has work from this gateway. While it returns True, the worker must complete
        steps.
        """
        self._limits = limits
        self._lost = lost
        self._busy = busy
        self._tick_s = min(TICK_S, limits.silence_s / 4)
        self._heard_at = self._stepped_at = self._ticked_at = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._heard_at = self._stepped_at = self._ticked_at = time.monotonic()
        self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick)

    def stop(self) -> None:
        """Stops watching. May be called more than once."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def heard(self) -> None:
        """Notes a message of any kind, including a heartbeat."""
        self._heard_at = time.monotonic()

    def stepped(self) -> None:
        """Notes that the worker has completed a step, or has received work from this gateway after it had none."""
        self._stepped_at = time.monotonic()

    def _tick(self) -> None:
        now, limits = time.monotonic(), self._limits
        if now - self._ticked_at > self._tick_s + OWN_PAUSE_S:
            self._heard_at = self._stepped_at = now
        elif now - self._heard_at > limits.silence_s:
            return self._lost(limits.silence_s, "has been silent")
        elif self._busy() and now - self._stepped_at > limits.stall_s:
            return self._lost(limits.stall_s, "has made no step")
        self._ticked_at = now
        self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick)
