"""Runs locust (`python -m loadtest`), with its web page if `--web` gives a port. Without an SLO, the exit status is 1
if a request failed; with an SLO, if too few requests met the limits.

If no ready service answers at the gRPC address, `looseleaf serve` is started for the run and ended after it.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from common.errors import StartupError
from loadtest.settings import LoadSettings

_LOCUSTFILE = Path(__file__).parent / "locustfile.py"


def main(settings: LoadSettings) -> int:
    with server(settings):
        process = subprocess.Popen(locust_command(settings))
        while True:
            with contextlib.suppress(KeyboardInterrupt):  # locust gets it too, and prints the result
                return process.wait()


def locust_command(settings: LoadSettings) -> list[str]:
    """Returns the command line of the run."""
    command = [
        sys.executable, "-m", "locust", "-f", str(_LOCUSTFILE), "--host", f"http://{settings.http}",
        "--users", str(settings.users), "--spawn-rate", str(settings.spawn_rate), *settings.flags(),
    ]  # fmt: skip
    command += ["--headless", "--only-summary"] if settings.web is None else ["--web-port", str(settings.web)]
    run_time = settings.run_time or ("60s" if settings.endless and settings.web is None else None)
    more = {"run-time": run_time, "csv": settings.csv, "html": settings.html, "processes": settings.processes}
    return command + [part for name, value in more.items() if value is not None for part in (f"--{name}", str(value))]


def is_ready(address: str) -> bool:
    """Returns whether a ready service answers at `address`."""
    command = [sys.executable, "-m", "looseleaf", "health", address]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@contextlib.contextmanager
def server(settings: LoadSettings) -> Iterator[None]:
    """A context manager that provides a server. Uses the server that already answers, or starts one and ends it."""
    if is_ready(settings.grpc):
        print(f"loadtest: using the server at {settings.grpc}", flush=True)
        yield
        return
    print(f"loadtest: nothing is ready at {settings.grpc}, starting `looseleaf serve`", flush=True)
    ports = ["--port", settings.http.rpartition(":")[2], "--grpc-port", settings.grpc.rpartition(":")[2]]
    process = subprocess.Popen([sys.executable, "-m", "looseleaf", "serve", *ports])
    try:
        wait_ready(process, settings)
        yield
    finally:
        process.terminate()
        process.wait()


def wait_ready(process: subprocess.Popen[bytes], settings: LoadSettings) -> None:
    """Waits until the server is ready. Raises StartupError if the server ends or takes too long."""
    deadline = time.monotonic() + settings.start_timeout_s
    while not is_ready(settings.grpc):
        if process.poll() is not None:
            raise StartupError(f"`looseleaf serve` ended with status {process.returncode}")
        if time.monotonic() > deadline:
            raise StartupError(f"`looseleaf serve` was not ready after {settings.start_timeout_s:.0f} s")
        time.sleep(0.5)


if __name__ == "__main__":
    try:
        sys.exit(main(LoadSettings.load(sys.argv[1:])))
    except StartupError as error:
        print(f"loadtest: {error}", file=sys.stderr)
        sys.exit(1)
