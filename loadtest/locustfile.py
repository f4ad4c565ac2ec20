"""Locust users of Looseleaf. Half of them use gRPC, half OpenAI's HTTP API, and all of them stream.

    locust -f loadtest/locustfile.py --host http://127.0.0.1:8000                       # users; web page on port 8089
    locust -f loadtest/locustfile.py --headless --trace mooncake.jsonl --slo-ttft 0.5   # a trace, at its own times

docs/load.md describes the flags and the results.
"""

from __future__ import annotations

import sys
from typing import Any

import grpc.experimental.gevent as grpc_gevent
import psutil
from locust import User, constant, events, task
from locust.runners import MasterRunner, WorkerRunner

from common.errors import StartupError
from loadtest import results
from loadtest.clients import GrpcClient, HttpClient
from loadtest.metrics import Record
from loadtest.session import Owner, Sender, serve_master
from loadtest.settings import FLAGS, LoadSettings, flag

_HOST = "http://127.0.0.1:8000"


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def add_arguments(parser: Any) -> None:
    """Adds the flags. Their values are validated in `prepare`. By default, running requests get 60 s to end."""
    for name, description in FLAGS.items():
        parser.add_argument(flag(name), help=description, include_in_web_ui=False)
    parser.set_defaults(stop_timeout=60.0)


@events.init.add_listener  # type: ignore[untyped-decorator]
def prepare(environment: Any, runner: Any, web_ui: Any, **_: Any) -> None:
    """Prepares the process. A worker gets its settings from the master. Exits with status 2 on a StartupError, such as
    for a wrong flag.
    """
    grpc_gevent.init_gevent()  # after locust has forked its workers, and before any channel is opened
    if isinstance(runner, WorkerRunner):
        serve_master(Sender(environment, Record()))
        return
    try:
        results.publish(_owner(environment), web_ui)
    except BaseException as error:
        for worker in psutil.Process().children():  # of --processes; locust ends them only after a run
            worker.terminate()
        if isinstance(error, StartupError):
            print(f"loadtest: {error}", file=sys.stderr)
            sys.exit(2)
        raise


def _owner(environment: Any) -> Owner:
    """Returns the owner of the result. If the run has no worker processes, also prepares this process to send."""
    given = {name: getattr(environment.parsed_options, name) for name in FLAGS}
    argv = [part for name, value in given.items() if value is not None for part in (flag(name), value)]
    settings = LoadSettings.load(argv)
    environment.host = environment.host or _HOST
    record = Record()
    owner = Owner(environment, settings, record)
    if not isinstance(environment.runner, MasterRunner):
        sender = Sender(environment, record)
        sender.use(settings)
        sender.share = (0, 1)
        sender.connect()
    return owner


class GrpcUser(User):  # type: ignore[misc]
    """A user of InferenceService.Generate, with its own connection."""

    wait_time = constant(0)  # type: ignore[misc]

    def on_start(self) -> None:
        self._client: GrpcClient | HttpClient = self._connect(self.environment.looseleaf)

    def _connect(self, sender: Sender) -> GrpcClient | HttpClient:
        return GrpcClient(sender.settings.grpc)

    def on_stop(self) -> None:
        self._client.close()

    @task
    def generate(self) -> None:
        sender: Sender = self.environment.looseleaf
        request = sender.next_request()
        self._client.send(request, sender.timer(self._client.protocol, request))


class OpenAIUser(GrpcUser):
    """A user of POST /v1/completions with server-sent events, with its own connection."""

    def _connect(self, sender: Sender) -> GrpcClient | HttpClient:
        return HttpClient(self.environment.host or _HOST, sender.model)
