"""Builds workers of every kind around a loaded model: prefill, decode, or both."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from block_store.holder.attach import attach
from common.service_main import Role, internal_server, serve_roles, worker_name
from common.settings import WorkerSettings
from common.trust import trust_of
from decode_svc import role as decode
from decode_svc.settings import DecodeSettings
from engine.model_runner import ModelRunner, RunnerSettings
from looseleaf.both_roles.settings import BothSettings
from prefill_svc import role as prefill
from prefill_svc.settings import PrefillSettings
from worker.fair_lock import FairLock
from worker.role import load_model


@dataclass(frozen=True, slots=True)
class Loaded:
    """The runner of a loaded model and, in a process that runs both roles, a second runner over the same weights."""

    runner: ModelRunner
    sharing: ModelRunner | None
    draft_runner: ModelRunner | None
    """The runner of the decode role's draft model, or None without such a model."""

    @classmethod
    def of(cls, settings: WorkerSettings, *, both: bool) -> Loaded:
        """Loads the model and its draft model, and creates the second runner if `both` is set."""
        runner = load_model(settings)
        draft_runner = decode.draft_runner_of(runner, settings) if isinstance(settings, DecodeSettings) else None
        return cls(runner, ModelRunner.sharing(runner, urgent=True) if both else None, draft_runner)

    def measure(self, settings: BothSettings) -> None:
        """Measures the memory that each role will request. The runners keep the results."""
        prefill.needs_of(self.runner, settings, "")
        decode.needs_of(self.sharing or self.runner, settings, "", self.draft_runner)


def join_both(loaded: Loaded, settings: BothSettings) -> list[Role]:
    """Attaches both roles to the block store, which waits for all expected workers, and returns the roles."""
    runner, sharing = loaded.runner, loaded.sharing
    assert sharing is not None
    draft_runner = decode.draft_runner_of(sharing, settings, loaded.draft_runner)
    name = worker_name("worker", settings.worker_id)
    needs = [
        prefill.needs_of(runner, settings, f"{name}.prefill"),
        decode.needs_of(sharing, settings, f"{name}.decode", draft_runner),
    ]
    for_prefill, for_decode = attach(settings.block_store, needs, trust_of(settings))
    turns = FairLock() if take_turns(settings, runner) else None
    return [
        prefill.PrefillRole(runner, needs[0], for_prefill, settings, turns),
        decode.DecodeRole(sharing, needs[1], for_decode, settings, turns, draft_runner),
    ]


def take_turns(settings: BothSettings, runner: ModelRunner) -> bool:
    on_cpu = runner.device.torch_device.type == "cpu"
    return settings.steps == "turns" or (settings.steps == "auto" and on_cpu)


async def serve(settings: WorkerSettings, join: Callable[[], Sequence[Role]]) -> None:
    """Binds the port, runs `join` in a thread, and serves the roles that it returns until a signal arrives or a role
    fails.
    """
    server = internal_server(settings)
    server.bind()
    await serve_roles(settings, server, await asyncio.to_thread(join))


async def stand_in(loaded: Loaded, package: str, flags: Sequence[str]) -> None:
    """Turns this process, which has loaded the model with one thread, into the worker that `python -m package flags`
    would start.
    """
    if package == "prefill_svc":
        of_prefill = PrefillSettings.load(flags)
        await serve(of_prefill, lambda: [prefill.join(_fitting(loaded, of_prefill).runner, of_prefill)])
    elif package == "decode_svc":
        of_decode = DecodeSettings.load(flags)
        await serve(of_decode, lambda: [_join_decode(_fitting(loaded, of_decode), of_decode)])
    else:
        of_both = BothSettings.load(flags)
        await serve(of_both, lambda: join_both(_fitting(loaded, of_both), of_both))


def _join_decode(loaded: Loaded, settings: DecodeSettings) -> Role:
    return decode.join(loaded.runner, settings, loaded.draft_runner)


def _fitting(loaded: Loaded, settings: WorkerSettings) -> Loaded:
    """Returns `loaded` with the number of threads that `settings` require. If other settings differ, loads the model
    again instead.
    """
    wanted = RunnerSettings.of(settings)
    if replace(wanted, num_threads=1) == loaded.runner.settings:
        for runner in (loaded.runner, loaded.sharing, loaded.draft_runner):
            if runner is not None:
                runner.use_threads(wanted.num_threads)
        return loaded
    logging.getLogger("spare").warning("the worker's model has different settings: loading it again")
    return Loaded.of(settings, both=loaded.sharing is not None)
