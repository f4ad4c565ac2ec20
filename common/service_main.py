"""How every service's process begins and ends: settings, logs, one event loop, one sentence when it cannot start."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import TypeVar

from common.errors import LooseleafError, StartupError
from common.settings import ServerSettings
from common.telemetry import configure_logging

S = TypeVar("S", bound=ServerSettings)


def run_service(name: str, settings_type: type[S], main: Callable[[S], Awaitable[None]]) -> None:
    """Run `main(settings)`; expected failures end the process with status 1 and one sentence on stderr."""
    settings = settings_type.load(sys.argv[1:])
    configure_logging(settings.log_level, json_lines=settings.json_logs)

    async def supervised() -> None:
        await main(settings)

    try:
        asyncio.run(supervised())
    except (StartupError, LooseleafError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        logging.shutdown()


def worker_name(role: str, given: str | None) -> str:
    """A worker's name: as given, else unique on the network by host name and process id."""
    return given or f"{role}-{socket.gethostname()}-{os.getpid()}"
