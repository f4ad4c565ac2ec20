"""`looseleaf serve`: starts the services, prints the addresses and one generated line, and runs until a signal arrives
or a service cannot be restarted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType

from common.api_keys import read_keys
from common.errors import StartupError
from looseleaf.serve.launcher import Addresses, Launcher, echo_to_stderr
from looseleaf.serve.sample import sample
from looseleaf.serve.settings import ServeSettings
from looseleaf.serve.supervisor import supervise


def run(argv: Sequence[str]) -> int:
    if "--ray" in argv:
        from looseleaf.commands import up

        return up.serve([word for word in argv if word != "--ray"])
    started = time.monotonic()
    settings = ServeSettings.load(argv)
    if None not in (settings.model, settings.model_directory) and settings.model != settings.model_directory:
        raise StartupError(f"two models given: {settings.model_directory} and --model {settings.model}")
    keys = read_keys(settings.api_key, settings.api_key_file)
    launcher = Launcher(settings, echo_to_stderr)
    stop = StopSignals(launcher)
    with launcher:
        try:
            addresses = launcher.start()
            stop.raise_if_set()
            with contextlib.suppress(OSError):  # if nobody reads the output any more
                print(banner(addresses, time.monotonic() - started), flush=True)
                print(sample(addresses.grpc, keys, settings.ssl_certfile), flush=True)
        except Interrupted:
            return 0
        supervise(launcher, stop.event)
    return 0


class Interrupted(BaseException):
    """The exception for a signal that arrives before the launch is complete."""


class StopSignals:
    """The handler of SIGTERM and SIGINT, which end the launch in an orderly way. A second signal kills the services.

    On SIGHUP, the gateway reads its key file again. A SIGHUP that comes from the closing of the terminal ends the
    launch, except under nohup.
    """

    def __init__(self, launcher: Launcher) -> None:
        self.event = threading.Event()
        self._launcher = launcher
        self._launched = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self._ends_with_terminal = has_terminal() and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN  # nohup
        signal.signal(signal.SIGHUP, self._on_hang_up)

    def _on_hang_up(self, number: int, frame: FrameType | None) -> None:
        if self._ends_with_terminal and not has_terminal():
            self._on_signal(number, frame)
        else:
            self._launcher.reload()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.event.is_set():
            self._launcher.kill()
            return
        self.event.set()
        if not self._launched:
            raise Interrupted

    def raise_if_set(self) -> None:
        """Raises Interrupted if a signal has arrived. After this call, the first signal only sets the event."""
        self._launched = True
        if self.event.is_set():
            raise Interrupted


def has_terminal() -> bool:
    """Returns whether this process has a controlling terminal that still exists."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def banner(addresses: Addresses, seconds: float) -> str:
    notice = f"\n  note  {addresses.notice}" if addresses.notice else ""
    vllm = "  vLLM  {}, prefill {}, decode {}   (vllm.grpc.engine.VllmEngine, for routers)\n"
    return (
        f"looseleaf: ready after {seconds:.1f} s\n"
        f"  HTTP  http{'s' * addresses.is_tls}://{addresses.http}/v1   (OpenAI API; /metrics and /health beside it)\n"
        f"  gRPC  {addresses.grpc}   (looseleaf.v1.InferenceService)\n"
        f"{vllm.format(*addresses.vllm_grpc) if addresses.vllm_grpc else ''}"
        f"  blocks  {addresses.block_store}   (looseleaf blocks {addresses.block_store}){notice}"
    )
