"""Starts both roles in one process: `python -m looseleaf.worker --model DIR --block-store HOST:PORT`.

One model, its weights once; for each role a runner, a step thread and an attachment; one gRPC server. To everybody else
they are a prefill and a decode worker at one address.

On a GPU each role steps in its own time, on its own stream. On a CPU they take turns and each has all the cores: two
OpenMP pools at once get less done (docs/log.md).
"""

from __future__ import annotations

import asyncio

from block_store.attach import attach
from common.service_main import Role, internal_server, run_service, serve_roles, worker_name
from common.trust import trust_of
from common.turns import Turns
from decode_svc.role import DecodeRole
from decode_svc.role import needs_of as decode_needs
from engine.runner import ModelRunner, RunnerSettings
from looseleaf.worker.settings import BothSettings
from prefill_svc.role import PrefillRole
from prefill_svc.role import needs_of as prefill_needs


def build(settings: BothSettings) -> list[Role]:
    """Load the model, measure the largest step of each role, attach both."""
    runner = ModelRunner(RunnerSettings.of(settings))
    sharing = ModelRunner.sharing(runner, urgent=True)
    name = worker_name("worker", settings.worker_id)
    needs = [
        prefill_needs(runner, settings, f"{name}.prefill"),
        decode_needs(sharing, settings, f"{name}.decode"),
    ]
    for_prefill, for_decode = attach(settings.block_store, needs, trust_of(settings))
    turns = Turns() if take_turns(settings, runner) else None
    return [
        PrefillRole(runner, needs[0], for_prefill, settings, turns),
        DecodeRole(sharing, needs[1], for_decode, settings, turns),
    ]


def take_turns(settings: BothSettings, runner: ModelRunner) -> bool:
    on_cpu = runner.device.torch_device.type == "cpu"
    return settings.steps == "turns" or (settings.steps == "auto" and on_cpu)


async def main(settings: BothSettings) -> None:
    server = internal_server(settings)
    server.bind()
    await serve_roles(settings, server, await asyncio.to_thread(build, settings))


if __name__ == "__main__":
    run_service("looseleaf.worker", BothSettings, main)
