"""`looseleaf up FILE`: starts a deployment on a Ray cluster, and returns when it serves requests."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, TextIO

from pydantic_settings import CliPositionalArg

from common.settings import Settings, settings_config
from looseleaf.cluster import client, ray_cluster
from looseleaf.cluster.settings import ClusterSettings, read_file


class UpSettings(Settings):
    """Flags of `looseleaf up`. The file contains the settings of `looseleaf serve --ray`, with underscores."""

    model_config = settings_config("LOOSELEAF_UP_", "looseleaf up")

    file: CliPositionalArg[Path]


def run(argv: Sequence[str]) -> int:
    settings = read_file(UpSettings.load(argv).file)
    with connected(settings.ray_address) as out:
        bring_up(settings, out)
    return 0


def serve(argv: Sequence[str]) -> int:
    """Runs `looseleaf serve --ray`: starts a deployment, and ends it when a signal arrives."""
    settings = ClusterSettings.load(argv)
    ended = threading.Event()
    with connected(settings.ray_address) as out:
        actor = bring_up(settings, out)
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: ended.set())
            ended.wait()
        finally:
            client.stop(actor)
    return 0


@contextmanager
def connected(ray_address: str) -> Iterator[TextIO]:
    """Connects to the Ray cluster for the time of the block. Yields the standard output, because during the block,
    `sys.stdout` is the standard error: Ray prints messages of its nodes there.
    """
    out = sys.stdout
    with redirect_stdout(sys.stderr):
        ray_cluster.connect(ray_address)
        try:
            yield out
        finally:
            ray_cluster.disconnect()


def bring_up(settings: ClusterSettings, out: TextIO) -> Any:
    """Starts a deployment, prints its addresses and one generated line to `out`, and returns the deployment's actor."""
    started = time.monotonic()
    actor = client.create(settings)
    try:
        status = client.wait_ready(actor, settings.startup_timeout_s, _tell)
        print(f"looseleaf: ready after {time.monotonic() - started:.1f} s", file=out)
        http, grpc_address = status["groups"]["front"]["addresses"]
        scheme = "http" if settings.ssl_certfile is None else "https"
        print(f"  HTTP  {scheme}://{http}/v1\n  gRPC  {grpc_address}\n{client.sample(actor)}", file=out, flush=True)
    except BaseException:
        client.stop(actor)
        raise
    return actor


def _tell(line: str) -> None:
    print(f"looseleaf: {line}", file=sys.stderr, flush=True)
