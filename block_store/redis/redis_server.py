"""The Redis server that stores the ledger: one that is given by URL, or a private `redis-server` (`private_redis`).

Servers with an evicting memory policy are rejected, because they would lose references. A client can be restricted to
the server in which the ledger was built.
"""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis

from block_store.errors import RedisUnusable
from block_store.redis.private_redis import CONNECT_TIMEOUT_S, START_TIMEOUT_S, PrivateServer
from block_store.redis.urls import NO_CLUSTER, client_of, without_passwords

_LOG = logging.getLogger(__name__)
CALL_TIMEOUT_S = 1.0
_LEAST_CONNECT_S = 0.2
_MIN_VERSION = (6, 2)
_UNVERIFIED = "CERTIFICATE_VERIFY_FAILED"
"""OpenSSL's name of the error, which redis-py passes on only as text."""


class RedisHandle:
    """A handle to a Redis server that `connect` has checked, and to its process if the server is private."""

    def __init__(self, url: str, run_id: str, version: str, private: PrivateServer | None) -> None:
        self.url = url
        self.run_id = run_id
        """Run ID of the only server that `client` accepts. `follow` changes it."""
        self.version = version
        self.client = open_client(url, lambda: self.run_id)
        self._any_server = open_client(url)
        self._private = private

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        """The current process of the private server, or None if the server is not private."""
        return None if self._private is None else self._private.process

    def follow(self) -> bool:
        """Makes `client` accept the server that currently answers. Returns whether this is a different server. Raises
        redis.ConnectionError or redis.TimeoutError if no server answers.
        """
        info: dict[str, Any] = self._any_server.info("server")
        before, self.run_id = self.run_id, str(info["run_id"])
        return self.run_id != before

    def close(self) -> None:
        """Closes the connections, and ends the private server if there is one."""
        self.client.close()
        self._any_server.close()
        if self._private is not None:
            self._private.close()


def connect(url: str | None, directory: str | os.PathLike[str], *, confined: bool = True) -> RedisHandle:
    """Connects to the Redis server at `url`, or starts a private server with its socket in `directory`
    (`PrivateServer`). Raises RedisUnusable if the server cannot be started or reached, is too old, or has an evicting
    memory policy.
    """
    private, where = None, url
    if where is None:
        private = PrivateServer(Path(directory), confined=confined)
        where = private.url
    try:
        handle = _check(where, private)
    except BaseException:
        if private is not None:
            private.close()
        raise
    what = (
        f"private redis-server {handle.version} ({private.origin})"
        if private is not None
        else f"redis {handle.version}"
    )
    _LOG.info("ledger in %s at %s", what, without_passwords(where))
    return handle


def open_client(
    url: str, run_id: str | Callable[[], str] | None = None, call_timeout_s: float = CALL_TIMEOUT_S
) -> redis.Redis:
    """Returns a thread-safe client with a pool of connections. With `run_id`, a connection is used only if the server
    has that run ID; if `run_id` is a function, it is called for each new connection.

    Opens no connection yet. A later call raises redis.ConnectionError if it opens a connection to a different server.
    Raises RedisUnusable if the URL is unusable (`client_of`).
    """
    expected = (lambda: run_id) if isinstance(run_id, str) else run_id
    # The retries of redis-py are off: a repeated call must carry the same number, which LedgerClient ensures.
    return client_of(
        url,
        socket_timeout=call_timeout_s,
        socket_connect_timeout=min(CONNECT_TIMEOUT_S, max(call_timeout_s, _LEAST_CONNECT_S)),
        retry=None,
        redis_connect_func=None if expected is None else _same_server(expected),
        protocol=2,
    )


def _check(url: str, private: PrivateServer | None) -> RedisHandle:
    shown = without_passwords(url)
    try:
        client = open_client(url, call_timeout_s=START_TIMEOUT_S)  # connecting may take CONNECT_TIMEOUT_S
        info: dict[str, Any] = client.info("server")
        policy: dict[str, Any] = client.info("memory")
    except (redis.RedisError, OSError) as error:
        what = "has a certificate that was not accepted" if _UNVERIFIED in str(error) else "does not answer"
        raise RedisUnusable(f"redis at {shown} {what}: {error}") from error
    if info["redis_mode"] == "cluster":
        raise RedisUnusable(f"redis at {shown} is a node of a cluster. {NO_CLUSTER}")
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
