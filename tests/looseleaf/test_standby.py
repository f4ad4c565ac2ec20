"""A real spare worker: it replaces any dead worker at once, and then a new spare worker starts."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from looseleaf.client import Client
from looseleaf.llm import serve_settings
from looseleaf.serve.launcher import Launcher
from looseleaf.serve.placement import settled
from looseleaf.serve.settings import ServeSettings
from looseleaf.serve.standby import wanted
from looseleaf.serve.supervisor import Supervisor
from testing.system import assert_nothing_held, wait_for

GIB = 1 << 30
PROMPT = list(range(20, 84))
TOKENS = 512
"""The number of tokens. A service is killed after KILL_AT tokens, when most of them are still to come."""
KILL_AT = 24
STREAMS = 6
"""The number of concurrent streams."""


class Served:
    """A deployment with a spare worker, and its log."""

    def __init__(self, roles: str) -> None:
        self.log: list[str] = []
        self.launcher = Launcher(serve_settings(None, {"roles": roles, "spare": 1, "num_blocks": 512}), self.log.append)
        self.addresses = self.launcher.start()
        self.supervisor = Supervisor(self.launcher)
        self.supervisor.start()
        self.client = Client(self.addresses.grpc, timeout=120.0)
        self.right = self.generate()
        self.pool = ThreadPoolExecutor(STREAMS)

    def generate(self, victim: str | None = None) -> Sequence[int]:
        """Returns the tokens of one stream. `victim`, if given, is killed during the stream."""
        tokens: list[int] = []
        for piece in self.client.generate(PROMPT, stream=True, max_tokens=TOKENS, temperature=0.0, ignore_eos=True):
            tokens += piece.token_ids
            if victim is not None and len(tokens) >= KILL_AT:
                os.kill(self.launcher.pids[victim], signal.SIGKILL)
                victim = None
        return tokens

    def generate_many(self, victim: str) -> list[Sequence[int]]:
        """Returns the tokens of STREAMS concurrent streams. A service is killed during one of them."""
        victims = [victim, *[None] * (STREAMS - 1)]
        return list(self.pool.map(self.generate, victims))

    def wait_loaded(self) -> int:
        """Waits until the spare worker has loaded the model. Returns its pid."""
        wait_for(lambda: self.launcher.spare_is_loaded, bool, 120.0, "no spare worker is loaded")
        return next(iter(self.launcher.spare_pids))

    def told(self, what: str) -> int:
        return sum(what in line for line in self.log)


@contextmanager
def served(roles: str) -> Iterator[Served]:
    running = Served(roles)
    try:
        yield running
        assert running.supervisor.failure is None
        assert_nothing_held(running.addresses.block_store)
    finally:
        running.pool.shutdown()
        running.client.close()
        running.supervisor.end()
        running.launcher.stop()


def niceness(pid: int) -> set[int]:
    """Returns the niceness of all threads of a process."""
    stats = [file.read_text().rpartition(")")[2].split() for file in Path(f"/proc/{pid}/task").glob("*/stat")]
    return {int(fields[16]) for fields in stats}


@pytest.mark.parametrize(("roles", "victims"), [("both", ["worker"]), ("split", ["decode", "prefill"])])
def test_it_takes_any_place_and_the_next_one_comes(roles: str, victims: list[str]) -> None:
    with served(roles) as running:
        for number, victim in enumerate(victims, 1):
            pid = running.wait_loaded()
            assert running.generate_many(victim) == [running.right] * STREAMS
            assert running.generate() == running.right
            assert running.launcher.pids[victim] == pid, "the process that was loaded, not one that was started now"
            assert niceness(pid) == {os.getpriority(os.PRIO_PROCESS, 0)}, (
                "what serves does not have the priority of what is loaded beside it"
            )
            wait_for(lambda: running.told("the spare worker takes its place"), number.__eq__, 60.0, "nobody notices")
        assert running.wait_loaded() not in running.launcher.pids.values()
        assert running.told("starting it again") == 0
        if roles == "both":  # one log line for all streams that a dead worker loses at the same moment
            wait_for(lambda: running.told("requests are prefilled again"), bool, 60.0, "the log does not tell")
            assert running.told("prefilled again") < STREAMS and running.told("sequences came back") < STREAMS


def test_its_own_death_hurts_nobody_and_before_it_is_loaded_a_worker_is_started_as_ever() -> None:
    with served("both") as running:
        os.kill(running.wait_loaded(), signal.SIGKILL)
        wait_for(lambda: running.told("spare was killed by signal 9"), bool, 60.0, "nobody notices")
        assert not running.launcher.spare_is_loaded
        answer = running.pool.submit(running.generate, "worker")
        notice = running.launcher._notice.file
        assert notice is not None
        wait_for(notice.exists, bool, 60.0, "the gateway is not told that a worker is being restarted")
        assert answer.result() == running.right
        wait_for(notice.exists, (False).__eq__, 60.0, "the worker is ready, but the notice stays")
        wait_for(lambda: running.told("worker was killed by signal 9; starting it again"), bool, 60.0, "nobody notices")
        running.wait_loaded()


def test_it_is_there_where_four_times_the_weights_are_free() -> None:
    def decided(free: int, weights: int, **given: object) -> bool:
        return wanted(settled(ServeSettings(**given)), weights, free)[0]  # type: ignore[arg-type]

    assert decided(4 * GIB, GIB) and not decided(4 * GIB - 1, GIB)
    assert not decided(GIB // 2, 1 << 20), "its process takes memory too"
    assert decided(0, GIB, spare=1) and not decided(100 * GIB, GIB, spare=0)
    _, why = wanted(settled(ServeSettings()), GIB, 2 * GIB)
    assert "2.00 GiB of memory free, 4.00 GiB wanted for 1.00 GiB of weights" in why
    on_gpu = settled(ServeSettings()).model_copy(update={"device": "cuda"})
    assert not wanted(on_gpu, GIB, 100 * GIB)[0]
