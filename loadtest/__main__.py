"""Runs locust without its web page for `--run-time` (`python -m loadtest`). The exit status is 1 if a request failed.

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
        return subprocess.run(locust_command(settings), check=False).returncode


def locust_command(settings: LoadSettings) -> list[str]:
    """Returns the command line of the run."""
    command = [
        sys.executable, "-m", "locust", "--headless", "--only-summary", "-f", str(_LOCUSTFILE),
        "--users", str(settings.users), "--spawn-rate", str(settings.spawn_rate), "--run-time", settings.run_time,
        "--stop-timeout", "60", "--exit-code-on-error", "1", "--host", f"http://{settings.http}",
        "--grpc-address", settings.grpc, "--workload-seed", str(settings.seed),
        "--prompt-median", str(settings.prompt_median), "--output-median", str(settings.output_median),
    ]  # fmt: skip
    command += ["--trace", settings.trace] if settings.trace else []
    return command + (["--csv", settings.csv] if settings.csv else [])


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
