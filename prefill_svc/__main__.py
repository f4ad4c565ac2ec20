"""Starts a prefill worker (`python -m prefill_svc --model DIR --block-store HOST:PORT`)."""

from __future__ import annotations

import asyncio

from common.service_main import internal_server, run_service, serve_roles
from prefill_svc.role import PrefillRole, join
from prefill_svc.settings import PrefillSettings
from worker.role import load_model


def build(settings: PrefillSettings) -> PrefillRole:
    """Loads the model, attaches it to the block store, and returns the role."""
    return join(load_model(settings), settings)


async def main(settings: PrefillSettings) -> None:
    server = internal_server(settings)
    server.bind()
    await serve_roles(settings, server, [await asyncio.to_thread(build, settings)])


if __name__ == "__main__":
    run_service("prefill_svc", PrefillSettings, main)
