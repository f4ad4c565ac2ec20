"""Runs a spare worker (`python -m looseleaf.both_roles.spare`), which loads a model and waits to replace a worker that
dies.

While it waits, it is not a holder, and it has no connection to the block store or to Redis. The launcher sends one line
on stdin with the package and the flags of the process to replace. The spare worker then attaches and becomes that
worker.

A thread with the lowest priority loads the model, so that loading takes little CPU time from serving processes. Threads
inherit the priority of the thread that starts them, and raising a priority needs a privilege. Other threads therefore
start the serving threads.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from common.errors import StartupError
from common.rpc import write_ready_file
from common.service_main import run_service
from common.settings import settings_config
from looseleaf.both_roles.settings import BothSettings
from looseleaf.serve.child import filled

if TYPE_CHECKING:
    from looseleaf.both_roles.roles import Loaded

_LOWEST = 19


class SpareSettings(BothSettings):
    """Flags of `python -m looseleaf.both_roles.spare`: the flags of the workers that it may replace, and `place`."""

    model_config = settings_config("LOOSELEAF_WORKER_", "looseleaf.both_roles.spare")
    place: Literal["both", "split"] = Field("split", description="replaces workers of both roles, or of either role")


def load(settings: SpareSettings) -> Loaded:
    """Imports a worker's modules, loads the model and measures the memory that it needs. Computes with one thread,
    because further kernel threads would inherit the priority of this thread.
    """
    from looseleaf.both_roles.roles import Loaded  # here, so that torch is imported at this thread's priority

    alone = settings.model_copy(update={"num_threads": 1})
    loaded = Loaded.of(alone, both=settings.place == "both")
    loaded.measure(alone)
    return loaded


def behind_others(settings: SpareSettings) -> Future[Loaded]:
    """Runs `load` in a thread with the lowest priority (nice 19), which takes little CPU time from other threads. Until
    `load` is done, garbage collection is off in the whole process. Returns the future of the result.
    """
    loaded: Future[Loaded] = Future()

    def run() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)
        gc.disable()
        try:
            loaded.set_result(load(settings))
        except BaseException as error:
            loaded.set_exception(error)
        finally:
            gc.enable()
            gc.freeze()

    threading.Thread(target=run, name="load", daemon=True).start()
    return loaded


async def order() -> tuple[str, list[str]]:
    """Waits for the launcher's line on stdin. Returns the package and the flags of the worker to replace. Raises
    StartupError if the launcher has ended.
    """
    line: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()

    def read() -> None:
        text = sys.stdin.readline()
        loop.call_soon_threadsafe(line.set_result, text)

    threading.Thread(target=read, name="order", daemon=True).start()
    if not (text := await line):
        raise StartupError("the launcher has ended, so no spare worker is needed")
    package, flags = json.loads(text)
    return package, filled(flags)


async def main(settings: SpareSettings) -> None:
    loaded = await asyncio.wrap_future(behind_others(settings))
    write_ready_file(settings.ready_file, [settings.place])
    package, flags = await order()
    from looseleaf.both_roles.roles import stand_in  # `load` has imported its modules

    await stand_in(loaded, package, flags)


if __name__ == "__main__":
    run_service("looseleaf.both_roles.spare", SpareSettings, main)
