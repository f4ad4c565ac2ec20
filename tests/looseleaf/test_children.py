"""Real child processes: readiness, deaths, a single request to end, and no orphans."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from textwrap import indent

import pytest

from common.errors import StartupError
from common.rpc import write_ready_file
from common.telemetry import json_line
from looseleaf.serve.child import later
from looseleaf.serve.children import Child, ChildDied, Echo, Restarts, ServiceSpec, end, labelled, wait_ready
from looseleaf.serve.launcher import echo_to_stderr
from testing.system import wait_for

ROOT = Path(__file__).resolve().parents[2]
READY = """
import signal, sys, time
path = sys.argv[sys.argv.index("--ready-file") + 1]
print("hello from", sys.argv[1], flush=True)
open(path, "w").write("127.0.0.1:1\\nsecond\\n")
"""
SLEEP = "time.sleep(600)\n"
Start = Callable[..., Child]


@pytest.fixture
def logged() -> list[str]:
    return []


@pytest.fixture
def start(tmp_path: Path, logged: list[str]) -> Start:
    """Starts a service whose `__main__` has the given source."""

    def start_one(source: str, echo: Echo = logged.append) -> Child:
        package = tmp_path / "packages" / "a_service"
        package.mkdir(parents=True)
        (package / "__main__.py").write_text('if __name__ == "__main__":\n' + indent(source, "    "))
        environment = os.environ | {"PYTHONPATH": f"{ROOT}:{package.parent}"}
        with open(os.devnull) as null:
            spec = ServiceSpec("svc", "a_service", ("--flag",), environment, null.fileno())
            return Child(spec, tmp_path, echo)

    return start_one


def is_running(pid: int) -> bool:
    """Returns whether a process with this pid exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_gone(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_running(pid)


def test_ready_lines_flags_and_logs(start: Start, logged: list[str]) -> None:
    child = start(READY + SLEEP)
    assert wait_ready([child], [child], 60.0) == [("127.0.0.1:1", "second")]
    end([child], 60.0)
    assert not is_running(child.pid)
    assert logged == ["svc         | hello from --flag"]


WAITING = """
import os, sys, time
from pathlib import Path
if __name__ == "__main__":
    print("given", sys.argv[1], flush=True)
    time.sleep(600)
else:
    Path(os.environ["IMPORTED"]).touch()  # to be seen from outside: a main module's import has no effect otherwise
"""


def test_a_flag_may_be_a_line_of_a_file_that_is_not_there_yet(tmp_path: Path, logged: list[str]) -> None:
    package = tmp_path / "a_service"
    package.mkdir()
    (package / "__main__.py").write_text(WAITING)
    imported, file = tmp_path / "imported", tmp_path / "store.ready"
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}", "IMPORTED": str(imported)}
    with open(os.devnull) as null:
        spec = ServiceSpec("svc", "a_service", (later(file, 1),), environment, null.fileno())
        child = Child(spec, tmp_path, logged.append)
    wait_for(imported.exists, bool, 60.0, "the service imports nothing while it waits")
    assert not logged and is_running(child.pid)
    write_ready_file(str(file), ["127.0.0.1:1", "unix:///run/redis.sock"])
    wait_for(lambda: logged, bool, 60.0, "the service does not start")
    end([child], 60.0)
    assert logged == ["svc         | given unix:///run/redis.sock"]


def test_a_service_whose_log_nobody_reads_goes_on(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with io.TextIOWrapper(io.FileIO(writer, "w"), write_through=True) as log:
        monkeypatch.setattr(sys, "stderr", log)
        echo_to_stderr("a line of the launcher")
        child = start("for _ in range(2000): print('x' * 99, flush=True)" + READY + SLEEP, lambda line: log.write(line))
        try:
            wait_ready([child], [child], 30.0)  # the output is larger than a pipe
        finally:
            end([child], 60.0)


def test_a_death_is_told_with_its_last_lines(start: Start) -> None:
    child = start("print('first'); print('the reason', flush=True); raise SystemExit(3)")
    with pytest.raises(ChildDied, match=r"svc ended with status 3(.|\n)*the reason"):
        wait_ready([child], [child], 60.0)


def test_a_killed_service_is_told_as_such(start: Start) -> None:
    child = start(READY + SLEEP)
    wait_ready([child], [child], 60.0)
    child.check()
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait(60.0)
    with pytest.raises(ChildDied, match="killed by signal 9"):
        child.check()


def test_not_ready_in_time(start: Start) -> None:
    child = start("import time\n" + SLEEP)
    with pytest.raises(StartupError, match="not ready after 0 s: svc"):
        wait_ready([child], [child], 0.3)
    end([child], 60.0)


def test_who_ignores_sigterm_is_killed(start: Start) -> None:
    child = start("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + READY + SLEEP)
    wait_ready([child], [child], 60.0)
    started = time.monotonic()
    end([child], 0.5)
    assert not is_running(child.pid)
    assert 0.5 <= time.monotonic() - started < 60.0


def test_a_service_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    package = tmp_path / "a_service"
    package.mkdir()
    (package / "__main__.py").write_text(READY + SLEEP)
    parent_source = f"""
import os, time
from pathlib import Path
from looseleaf.serve.children import Child, ServiceSpec, wait_ready
with open(os.devnull) as null:
    spec = ServiceSpec("svc", "a_service", ("--flag",), os.environ, null.fileno())
    child = Child(spec, Path({str(tmp_path)!r}), print)
wait_ready([child], [child], 60.0)
print("pid", child.pid, flush=True)
time.sleep(600)
"""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    parent = subprocess.Popen([sys.executable, "-c", parent_source], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    pid = next(int(line.split()[1]) for line in parent.stdout if line.startswith("pid"))
    assert is_running(pid)
    parent.kill()
    parent.wait()
    assert wait_gone(pid, 60.0)


STANDS_BY = """
import json, os, sys, time
path = sys.argv[sys.argv.index("--ready-file") + 1]
open(path, "w").write("loaded\\n")
package, flags = json.loads(sys.stdin.readline())
print("is", package, flags[0], flush=True)
open(flags[flags.index("--ready-file") + 1], "w").write("127.0.0.1:2\\n")
time.sleep(600)
"""


def test_who_takes_a_place_has_its_name_its_ready_file_and_its_log(tmp_path: Path, logged: list[str]) -> None:
    package = tmp_path / "packages" / "stands_by"
    package.mkdir(parents=True)
    (package / "__main__.py").write_text('if __name__ == "__main__":\n' + indent(STANDS_BY, "    "))
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{package.parent}"}
    with open(os.devnull) as null:
        spec = ServiceSpec("spare", "stands_by", (), environment, null.fileno(), takes_orders=True)
        child = Child(spec, tmp_path, logged.append)
    assert wait_ready([child], [child], 60.0) == [("loaded",)]
    place = ServiceSpec("svc", "a_service", ("--flag",), environment, 0)
    assert child.become(place)
    assert wait_ready([child], [child], 60.0) == [("127.0.0.1:2",)]
    end([child], 60.0)
    assert (child.name, child.spec) == ("svc", place) and logged == ["svc         | is a_service --flag"]


def test_who_has_ended_takes_no_place(start: Start) -> None:
    child = start("raise SystemExit(1)")
    child.spec = replace(child.spec, takes_orders=True)
    dead = Child(child.spec, Path(child.spec.environment["PYTHONPATH"].rpartition(":")[2]).parent, lambda line: None)
    assert dead.wait(60.0) and not dead.become(child.spec)


def test_a_service_that_keeps_ending_is_not_started_again() -> None:
    restarts = Restarts()
    assert [restarts.allow("one") for _ in range(6)] == [True] * 5 + [False]
    assert restarts.allow("other")


def test_the_launcher_adds_the_name_of_the_process_to_its_lines() -> None:
    line = json_line("decode_svc", "ready", 0.5, "info", logger="decode")
    assert labelled("decode-0", line, "text") == f"decode-0    | {line}"
    event = json.loads(labelled("decode-0", line, "json"))
    assert event["process"] == "decode-0" and event["time"] == "1970-01-01T00:00:00.500Z"
    for plain in ("Traceback (most recent call last):", "7"):
        event = json.loads(labelled("decode-0", plain, "json"))
        assert (event["service"], event["message"]) == ("decode-0", plain)
