"""A Redis master, its replica and a Sentinel, all with passwords and, optionally, with TLS."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

from block_store.redis.private_redis import find_server
from block_store.redis.redis_server import open_client
from testing.chaos.redis_process import RedisProcess
from testing.chaos.stack import free_ports
from testing.system import wait_for

PASSWORD, SENTINEL_PASSWORD = "0f-redis", "0f-sentinel"
DOWN_MS = 1000
"""The time in milliseconds for which a master is silent before the Sentinel counts it as down."""


class SentinelGroup:
    """A running group. Its master can be killed; the Sentinel then promotes the replica."""

    def __init__(self, directory: Path, certs: Path | None = None) -> None:
        """Starts the group. With `certs`, a directory that `looseleaf certs` has filled, all connections use TLS."""
        ports = free_ports(3)
        tls = [] if certs is None else [
            ("tls-cert-file", f"{certs}/front.pem"), ("tls-key-file", f"{certs}/front.key"),
            ("tls-ca-cert-file", f"{certs}/ca.pem"), ("tls-replication", "yes"),
        ]  # fmt: skip
        port_flag = "port" if certs is None else "tls-port"
        common = [*tls, ("masterauth", PASSWORD), ("repl-diskless-sync-delay", "0")]
        self._replica_port = ports[1]
        self.master = self._server(directory / "master", [*common, (port_flag, str(ports[0]))])
        self.replica = self._server(
            directory / "replica", [*common, (port_flag, str(ports[1])), ("replicaof", f"127.0.0.1 {ports[0]}")]
        )
        # A Sentinel asks a replica for its link only every ten seconds, so it is started when the link is up.
        wait_for(self._link, lambda link: link == "up", 30, "the replica has no link to its master")
        self._sentinel = self._start_sentinel(
            directory,
            [
                *tls, ("port", "0"), (port_flag, str(ports[2])), ("requirepass", SENTINEL_PASSWORD),
                ("sentinel monitor", f"mymaster 127.0.0.1 {ports[0]} 1"),
                ("sentinel auth-pass", f"mymaster {PASSWORD}"),
                ("sentinel down-after-milliseconds", f"mymaster {DOWN_MS}"),
                ("sentinel failover-timeout", "mymaster 10000"),
            ],
        )  # fmt: skip
        scheme = "redis" if certs is None else "rediss"
        query = "" if certs is None else (
            f"&ssl_ca_certs={certs}/ca.pem&ssl_certfile={certs}/front.pem&ssl_keyfile={certs}/front.key"
        )  # fmt: skip
        [nobody] = free_ports(1)
        self.url = (
            f"{scheme}+sentinel://:{PASSWORD}@127.0.0.1:{nobody},127.0.0.1:{ports[2]}/mymaster/0"
            f"?sentinel_password={SENTINEL_PASSWORD}{query}"
        )
        """The URL of the master. The first Sentinel that it names does not exist."""
        sentinel_url = f"{scheme}://:{SENTINEL_PASSWORD}@127.0.0.1:{ports[2]}?{query}"
        self.sentinel = open_client(sentinel_url)
        wait_for(self._replicas, lambda found: found == ["ok"], 30, "the Sentinel has not found the replica")

    def _link(self) -> str:
        return str(self.replica.client.info("replication")["master_link_status"])

    def _replicas(self) -> list[str]:
        """Returns the state of each known replica's link to its master."""
        try:
            return [replica["master-link-status"] for replica in self.sentinel.sentinel_slaves("mymaster")]
        except Exception:  # the Sentinel does not answer yet; this package may not import redis' error classes
            return []

    def _server(self, directory: Path, flags: list[tuple[str, str]]) -> RedisProcess:
        directory.mkdir()
        given = [word for name, value in flags for word in (f"--{name}", *value.split())]
        return RedisProcess(directory, given, PASSWORD)

    def _start_sentinel(self, directory: Path, lines: list[tuple[str, str]]) -> subprocess.Popen[bytes]:
        (config := directory / "sentinel.conf").write_text("".join(f"{name} {value}\n" for name, value in lines))
        log = str(directory / "sentinel.log")
        return subprocess.Popen(
            [find_server()[0], str(config), "--sentinel", "--logfile", log, "--dir", str(directory)]
        )

    def switch(self) -> None:
        """Makes the Sentinel promote the replica while the master is up, and demotes the master. The Sentinel would do
        the same to it, but waits for eight seconds.
        """
        self.sentinel.sentinel_failover("mymaster")
        self.wait_promoted()
        self.master.client.replicaof("127.0.0.1", self._replica_port)
        self.master.client.client_kill_filter(_type="normal", skipme=True)

    def wait_promoted(self) -> None:
        """Waits until the replica is a master."""
        wait_for(self._role, lambda role: role == "master", 60, "no failover")

    def _role(self) -> str:
        try:
            return str(self.replica.client.info("replication")["role"])
        except Exception as error:  # the Sentinel closes all connections of the server that it promotes, in one step
            return f"unknown: {error}"

    def close(self) -> None:
        self._sentinel.kill()
        self._sentinel.wait()
        self.sentinel.close()
        self.replica.close()
        self.master.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
