"""Starts a prefill worker: `python -m prefill_svc --model DIR --block-store HOST:PORT`. Builds what it needs."""

from __future__ import annotations

import asyncio

from block_store.attach import attach
from common.service_main import internal_server, run_service, serve_roles, worker_name
from common.trust import trust_of
from common.turns import SharedTurns
from engine.runner import ModelRunner, RunnerSettings
from prefill_svc.role import PrefillRole, needs_of
from prefill_svc.settings import PrefillSettings


def build(settings: PrefillSettings) -> PrefillRole:
    """Load the model, measure it, attach."""
    runner = ModelRunner(RunnerSettings.of(settings))
    needs = needs_of(runner, settings, worker_name("prefill", settings.worker_id))
    [attached] = attach(settings.block_store, [needs], trust_of(settings))
    turns = SharedTurns(settings.turns_file) if settings.turns_file is not None else None
    return PrefillRole(runner, needs, attached, settings, turns)


async def main(settings: PrefillSettings) -> None:
    server = internal_server(settings)
    server.bind()
    await serve_roles(settings, server, [await asyncio.to_thread(build, settings)])


if __name__ == "__main__":
    run_service("prefill_svc", PrefillSettings, main)
