"""A worker of both roles that does not overlap restores with steps, for `disk_tier`. It takes the flags of `python -m
looseleaf.both_roles`.

A prompt takes a turn (`worker.fair_lock`) while its prefix is looked up on disk and restored, so that neither prefill
nor decode steps meanwhile.
"""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import Any

from common.service_main import run_service
from looseleaf.both_roles.__main__ import main
from looseleaf.both_roles.settings import BothSettings
from prefill_svc.service import PrefillServicer


def install() -> None:
    """Patches the service in this process. Call this once, before the service's `main`."""
    submit = PrefillServicer._submit

    async def submit_in_turn(servicer: PrefillServicer, *args: Any) -> None:
        loop, turns = asyncio.get_running_loop(), servicer._thread._turns

        def take_turn() -> None:
            with turns or nullcontext():
                asyncio.run_coroutine_threadsafe(submit(servicer, *args), loop).result()

        await asyncio.to_thread(take_turn)

    setattr(PrefillServicer, "_submit", submit_in_turn)  # noqa: B010 - mypy rejects an assignment to a method


if __name__ == "__main__":
    install()
    run_service("looseleaf.both_roles", BothSettings, main)
