"""A silent worker, or one without steps, is detected. A pause of the gateway itself does not count."""

from __future__ import annotations

import asyncio
import time

from gateway.fleet.liveness import OWN_PAUSE_S, Liveness, LivenessLimits
from testing.virtual_time import in_virtual_time


class Watch:
    """A `Liveness`, with a record of its reports."""

    def __init__(self, silence_s: float, stall_s: float = 60.0, *, busy: bool = False) -> None:
        self.told: list[tuple[float, str]] = []
        limits = LivenessLimits(silence_s, stall_s)
        self.liveness = Liveness(limits, lambda seconds, why: self.told.append((seconds, why)), lambda: busy)
        self.liveness.start()


@in_virtual_time
async def test_silence_is_told_once_after_its_limit() -> None:
    watch = Watch(0.2)
    for _ in range(8):
        await asyncio.sleep(0.05)
        watch.liveness.heard()
    assert not watch.told
    await asyncio.sleep(0.6)
    assert watch.told == [(0.2, "has been silent")]


@in_virtual_time
async def test_a_worker_without_steps_is_told_only_while_it_has_work() -> None:
    busy, idle = Watch(0.4, 0.2, busy=True), Watch(0.4, 0.2)
    for _ in range(10):
        await asyncio.sleep(0.05)
        for watch in (busy, idle):
            watch.liveness.heard()
    assert busy.told == [(0.2, "has made no step")] and not idle.told
    idle.liveness.stop()


@in_virtual_time
async def test_nothing_is_told_after_the_end() -> None:
    watch = Watch(0.05)
    watch.liveness.stop()
    await asyncio.sleep(0.2)
    assert not watch.told


@in_virtual_time
async def test_our_own_pause_is_no_silence() -> None:
    watch = Watch(0.3)
    await asyncio.sleep(0.01)
    time.sleep(OWN_PAUSE_S + 0.4)  # blocks the event loop itself
    await asyncio.sleep(0.15)
    assert not watch.told
    await asyncio.sleep(0.5)
    assert len(watch.told) == 1
