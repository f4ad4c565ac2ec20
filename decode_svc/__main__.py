"""Starts a decode worker (`python -m decode_svc --model DIR --block-store HOST:PORT`)."""

from __future__ import annotations

import asyncio

from common.service_main import internal_server, run_service, serve_roles
from decode_svc.role import DecodeRole, join
from decode_svc.settings import DecodeSettings
from worker.role import load_model


def build(settings: DecodeSettings) -> DecodeRole:
    """Loads the model, attaches it to the block store, and returns the role."""
    return join(load_model(settings), settings)


async def main(settings: DecodeSettings) -> None:
    server = internal_server(settings)
    server.bind()
    await serve_roles(settings, server, [await asyncio.to_thread(build, settings)])


if __name__ == "__main__":
    run_service("decode_svc", DecodeSettings, main)
