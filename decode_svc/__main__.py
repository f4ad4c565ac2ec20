"""Starts a decode worker: `python -m decode_svc --model DIR --block-store HOST:PORT`. Builds what it needs."""

from __future__ import annotations

import asyncio

from block_store.attach import attach
from common.service_main import internal_server, run_service, serve_roles, worker_name
from common.trust import trust_of
from common.turns import SharedTurns
from decode_svc.role import DecodeRole, needs_of
from decode_svc.settings import DecodeSettings
from engine.runner import ModelRunner, RunnerSettings


def build(settings: DecodeSettings) -> DecodeRole:
    """Load the model, measure it, attach."""
    runner = ModelRunner(RunnerSettings.of(settings))
    needs = needs_of(runner, settings, worker_name("decode", settings.worker_id))
    [attached] = attach(settings.block_store, [needs], trust_of(settings))
    turns = SharedTurns(settings.turns_file) if settings.turns_file is not None else None
    return DecodeRole(runner, needs, attached, settings, turns)


async def main(settings: DecodeSettings) -> None:
    server = internal_server(settings)
    server.bind()
    await serve_roles(settings, server, [await asyncio.to_thread(build, settings)])


if __name__ == "__main__":
    run_service("decode_svc", DecodeSettings, main)
