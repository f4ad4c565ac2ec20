"""The parts of a load test in locust's processes: a `Sender` in each process that sends, and an `Owner` in the process
that owns the result. A run of one process has both.

In a distributed run, the master gives each worker the settings and a share of the requests, workers add their records
to locust's reports, and the master adds these up. At the end, the master waits, for a limited time, for the last report
of each worker.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import gevent
import grpc
from locust.runners import STATE_RUNNING, STATE_SPAWNING, MasterRunner, WorkerRunner

from common.errors import StartupError
from loadtest import shapes
from loadtest.arrivals import Plan, Work
from loadtest.clients import GrpcClient, HttpClient, the_model
from loadtest.metrics import Record
from loadtest.open_loop import Replay
from loadtest.settings import LoadSettings
from loadtest.stats import Collector, StreamTimer
from loadtest.workload import Request

_log = logging.getLogger("loadtest")
_HELLO, _START, _FINISH = "looseleaf_hello", "looseleaf_start", "looseleaf_finish"
"""The types of three messages: a worker announces that it listens; the master sends the settings and the worker's
share; and the master asks the worker to stop and to report.
"""
_MOST_WORKERS = 1024
"""Workers of a closed-loop run draw disjoint requests up to this number of workers."""
_REPORT_S = 10.0
"""Time that a worker has for its first message, and for its last report after its requests have ended."""


class Sender:
    """The part of a process that sends requests, with its clients and its record of observations."""

    def __init__(self, environment: Any, record: Record) -> None:
        self.environment = environment
        self.record = record
        self.settings = LoadSettings()
        self.share: tuple[int, int] | None = None
        """The index of this process, and the number of processes. A worker that joined after the start has None."""
        self.digest: str | None = None
        """The digest of the master's plan."""
        self.replay: Replay | None = None
        self.finished = False
        """Whether the process has stopped and everything is in its record."""
        environment.looseleaf = self
        environment.events.test_start.add_listener(self._start)
        environment.events.test_stopping.add_listener(self._stop)

    @property
    def done(self) -> bool:
        """Whether this process has sent its share of an open-loop run, and all answers have ended."""
        return self.replay is not None and self.replay.done

    def use(self, settings: LoadSettings) -> None:
        """Uses the settings, and has locust start the kind of user that they need."""
        self.settings = settings
        if settings.open_loop:
            self.environment.user_classes[:] = [shapes.OpenLoopUser]

    def connect(self) -> None:
        """Prepares the plan and the requests. Raises StartupError if the trace cannot be read or differs from the
        master's, or if no gateway answers.
        """
        self._plan = Plan(self.settings)
        if self.digest not in (None, self._plan.digest):
            raise StartupError(f"--trace {self.settings.trace}: differs from the master's file")
        try:
            model = the_model(self.settings.grpc)
        except grpc.RpcError as error:
            raise StartupError(f"--grpc {self.settings.grpc}: no gateway answers: {error.details()}") from None
        self.model: str = model.id
        self._work: Work = self._plan.work(model.vocab_size, model.max_model_len)

    def _start(self, **_: Any) -> None:
        self.record.clear()
        self.finished = False
        self.replay = None
        settings, environment = self.settings, self.environment

        def log_part(name: str, protocol: str, ms: float, tokens: int) -> None:
            environment.stats.get(name, protocol).log(ms, tokens)

        self._collector = Collector(environment.events.request.fire, log_part, self.record, settings.slo)
        self._numbers = self._closed_loop_numbers()
        if settings.open_loop and self.share is not None:
            self._clients = (GrpcClient(settings.grpc), HttpClient(environment.host, self.model))
            self.replay = Replay(self._plan.arrivals(), *self.share, self._send)
            self.replay.start()

    def _closed_loop_numbers(self) -> Iterator[int]:
        """Returns the numbers of the requests that this process sends. With up to _MOST_WORKERS workers, no other
        process sends them.
        """
        if isinstance(self.environment.runner, WorkerRunner):
            return itertools.count(self.environment.runner.worker_index, _MOST_WORKERS)
        return itertools.count()

    def next_request(self) -> Request:
        """Returns the next request of a closed-loop run."""
        return self._work.request(next(self._numbers))[0]

    def timer(self, protocol: str, request: Request, **about: Any) -> StreamTimer:
        """Returns the timer of a request that is sent now."""
        return StreamTimer(self._collector, protocol, len(request.prompt_ids), **about)

    def _send(self, number: int, late_s: float) -> None:
        """Sends a request of the share. Each process uses both protocols in turn."""
        assert self.share is not None
        request, cut = self._work.request(number)
        client = self._clients[number // self.share[1] % len(self._clients)]
        client.send(request, self.timer(client.protocol, request, late_s=late_s, cut=cut))

    def _stop(self, **_: Any) -> None:
        if self.replay is not None:
            self.replay.stop(self.environment.stop_timeout)


class Owner:
    """The part of a process that decides when the run ends, and has the sum of all records."""

    def __init__(self, environment: Any, settings: LoadSettings, record: Record) -> None:
        """Reads the trace, if there is one. Raises StartupError if the trace cannot be read."""
        self.environment = environment
        self.settings = settings
        self.record = record
        self.plan = Plan(settings)
        self.expected = self.plan.num_requests
        """The number of requests of the run, or None if it is not known in advance."""
        self.stopped_early = False
        """Whether an open-loop run was ended before it was over, by --run-time or by hand."""
        self._listening: set[str] = set()
        """Workers that have said that they listen."""
        self._waiting: set[str] = set()
        """Workers that have a share and have not reported that it is done."""
        self._unfinished: set[str] = set()
        self._add_shape()
        environment.events.test_start.add_listener(self._start)
        environment.events.test_stopping.add_listener(self._stopping)
        if isinstance(environment.runner, MasterRunner):
            environment.runner.register_message(_HELLO, self._greet)
            environment.events.worker_report.add_listener(self._report)

    def _add_shape(self) -> None:
        environment = self.environment
        if self.settings.open_loop:
            environment.user_classes[:] = [shapes.OpenLoopUser]
            environment.shape_class = shapes.OpenLoopShape(self._num_processes, self.is_over)
        elif self.settings.shape is not None:
            environment.shape_class = shapes.UsersShape(self.plan.shape)
        if environment.shape_class is not None:
            environment.shape_class.runner = environment.runner

    def _num_processes(self) -> int:
        return int(self.environment.runner.worker_count)

    def is_over(self) -> bool:
        """Returns whether every process that was not lost has sent its share of an open-loop run and received all
        answers.
        """
        if not isinstance(self.environment.runner, MasterRunner):
            return bool(self.environment.looseleaf.done)
        return not self._present(self._waiting)

    def _present(self, workers: set[str]) -> set[str]:
        """Returns those of `workers` that have not been lost."""
        clients = self.environment.runner.clients
        return {name for name in workers if name in clients and clients[name].state != "missing"}

    @property
    def unsent(self) -> int:
        """The number of expected requests that were not sent or not reported, or 0 if the run was ended early."""
        return 0 if self.expected is None or self.stopped_early else self.expected - self.record.total.sent

    def _start(self, **_: Any) -> None:
        self.record.clear()
        self.stopped_early = False
        if isinstance(self.environment.runner, MasterRunner):
            workers = [client.id for client in self.environment.runner.clients.ready]
            self._waiting = set(workers)
            _wait(lambda: self._waiting <= self._listening, _REPORT_S)
            for index, client_id in enumerate(workers):
                self._assign(client_id, (index, len(workers)))

    def _greet(self, msg: Any, **_: Any) -> None:
        """Notes that a worker listens. A worker that joins during a run takes part only if the run is closed-loop."""
        self._listening.add(msg.node_id)
        if self.environment.runner.state in (STATE_SPAWNING, STATE_RUNNING):
            self._assign(msg.node_id, None)

    def _assign(self, client_id: str, share: tuple[int, int] | None) -> None:
        data = {"settings": self.settings.model_dump(mode="json"), "share": share, "digest": self.plan.digest}
        self.environment.runner.send_message(_START, data, client_id)

    def _report(self, client_id: str, data: dict[str, Any], **_: Any) -> None:
        if "looseleaf" in data:
            report = data["looseleaf"]
            self.record.add(report["record"])
            self._waiting -= {client_id} if report["done"] else set()
            self._unfinished -= {client_id} if report["finished"] else set()

    def _stopping(self, **_: Any) -> None:
        """Notes whether an open-loop run ends early. Waits, for a limited time, until all workers have reported."""
        runner = self.environment.runner
        self.stopped_early = self.settings.open_loop and not self.is_over()
        if not isinstance(runner, MasterRunner):
            return
        self._unfinished = {client.id for client in runner.clients.all}
        for client_id in self._unfinished:
            runner.send_message(_FINISH, None, client_id)
        _wait(lambda: not self._present(self._unfinished), self.environment.stop_timeout + _REPORT_S)
        for client_id in self._unfinished:
            _log.error("worker %s was lost; its last requests are missing from the result", client_id)


def _wait(condition: Callable[[], bool], timeout_s: float) -> None:
    """Waits until the condition holds, or until the time is up."""
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        gevent.sleep(0.05)


def serve_master(sender: Sender) -> None:
    """Makes a worker follow the master's messages, and adds its record to its reports."""
    environment, runner = sender.environment, sender.environment.runner

    def on_start(msg: Any, **_: Any) -> None:
        sender.use(LoadSettings(**msg.data["settings"]))
        sender.share = tuple(msg.data["share"]) if msg.data["share"] is not None else None
        sender.digest = msg.data["digest"]
        try:
            sender.connect()
        except StartupError as error:
            _log.error("%s", error)
            environment.process_exit_code = 2
            runner.send_message("exception", {"msg": str(error), "traceback": ""})
            runner.quit()

    def on_finish(**_: Any) -> None:
        runner.stop()
        sender.finished = True
        environment.stop_timeout = 0.0  # locust would wait for it again before the next run, which sets it

    def on_report(data: dict[str, Any], **_: Any) -> None:
        done, finished = sender.done, sender.finished  # before the record is taken, which then has everything
        data["looseleaf"] = {"record": sender.record.take(), "done": done, "finished": finished}

    runner.register_message(_START, on_start)
    runner.register_message(_FINISH, on_finish, concurrent=True)
    environment.events.report_to_master.add_listener(on_report)
    runner.send_message(_HELLO)
