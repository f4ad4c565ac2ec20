"""A private Redis for the chaos suite, which can be killed, emptied, frozen, and restored from an older snapshot."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from block_store.redis.private_redis import find_server
from block_store.redis.redis_server import open_client

START_S = 60.0


class RedisProcess:
    """A Redis server on a Unix socket, whose path stays the same after a restart."""

    def __init__(self, directory: Path, flags: Sequence[str] = (), password: str = "") -> None:
        """Starts the server, empty. `directory` contains the socket and the snapshots; `flags` are further flags of
        `redis-server`.
        """
        self._directory = directory
        self._flags = [*flags, *(["--requirepass", password] if password else [])]
        self._socket = directory / "redis.sock"
        self.url = f"unix://:{password}@{self._socket}" if password else f"unix://{self._socket}"
        self.client = open_client(self.url, call_timeout_s=20.0)
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self._socket.unlink(missing_ok=True)
        binary, _ = find_server()
        process = subprocess.Popen(
            [
                binary, "--port", "0", "--unixsocket", str(self._socket), "--save", "", "--appendonly", "no",
                "--maxmemory-policy", "noeviction", "--dir", str(self._directory), "--dbfilename", "dump.rdb",
                "--logfile", str(self._directory / "redis.log"), *self._flags,
            ],
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        deadline = time.monotonic() + START_S
        while not self._answers():
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                raise RuntimeError(f"redis-server did not start; see {self._directory / 'redis.log'}")
            time.sleep(0.005)
        return process

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except Exception:  # this package may not import redis' error classes
            return False

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def start_empty(self) -> None:
        """Starts a new server without data."""
        (self._directory / "dump.rdb").unlink(missing_ok=True)
        self._process = self._start()

    def start_from(self, snapshot: Path) -> None:
        """Starts a new server with the data of a snapshot."""
        shutil.copy(snapshot, self._directory / "dump.rdb")
        self._process = self._start()

    def snapshot(self, name: str) -> Path:
        """Saves all current data in a file, and returns its path."""
        self.client.save()
        return Path(shutil.copy(self._directory / "dump.rdb", self._directory / name))

    def flush(self) -> None:
        self.client.flushall()

    def freeze(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        self.client.close()
        self._process.kill()
        self._process.wait()
