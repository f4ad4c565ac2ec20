"""URLs of Redis servers: those that `redis-py` takes work, and each unusable one gets an error that names the fault."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from block_store.errors import RedisUnusable
from block_store.redis.redis_server import connect
from block_store.redis.urls import client_of, without_passwords
from looseleaf.commands.certs import make
from testing.chaos.redis_process import RedisProcess
from testing.chaos.stack import free_ports
from testing.redis_tls import TlsRedis


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="ll-urls-"))
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[TlsRedis]:
    running = TlsRedis(directory)
    yield running
    running.close()


def test_a_server_with_tls_and_client_certificates_is_used(server: TlsRedis, directory: Path) -> None:
    handle = connect(server.url, directory)
    assert handle.run_id == server.client.info("server")["run_id"]
    assert handle.client.set("a", "b") and server.client.get("a") == b"b"
    handle.close()


def test_each_fault_of_a_tls_url_is_named(server: TlsRedis, directory: Path) -> None:
    (strangers := directory / "strangers").mkdir()
    make(strangers, [], timedelta(days=1))
    ours, address = server.certs, f"rediss://:{server.password}@127.0.0.1:{server.port}"
    own = f"&ssl_certfile={ours}/front.pem&ssl_keyfile={ours}/front.key"
    for url, fault in {
        f"{address}?ssl_ca_certs={strangers}/ca.pem{own}": "a certificate that was not accepted: .*VERIFY_FAILED",
        address: "a certificate that was not accepted: .*VERIFY_FAILED",
        f"{address}?ssl_ca_certs={ours}/ca.pem": "does not answer",  # without a client certificate
        f"{address}?ssl_ca_certs={ours}/none.pem": f"ssl_ca_certs names no file: {ours}/none.pem",
        f"{address}?ssl_ca_cert={ours}/ca.pem": "cannot have the parameter 'ssl_ca_cert'",
        f"redis://127.0.0.1?ssl_ca_certs={ours}/ca.pem": "cannot have the parameter 'ssl_ca_certs'",
    }.items():
        with pytest.raises(RedisUnusable, match=fault) as refusal:
            connect(url, directory)
        assert server.password not in str(refusal.value)


@pytest.mark.parametrize("url", ["nonsense", "nonsense://x", "redis://:secret@host:port", "host:6379"])
def test_a_malformed_url_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(RedisUnusable, match="a Redis URL must be redis://HOST:PORT") as refusal:
        client_of(url)
    assert "secret" not in str(refusal.value)


def test_a_cluster_is_refused(directory: Path) -> None:
    for scheme in ("redis", "rediss"):
        with pytest.raises(RedisUnusable, match="Redis Cluster is not supported"):
            connect(f"{scheme}+cluster://127.0.0.1:7000,127.0.0.1:7001", directory)
    (node := directory / "node").mkdir()
    [port] = free_ports(1)
    member = RedisProcess(node, ["--port", str(port), "--cluster-enabled", "yes", "--cluster-port", "0"])
    with pytest.raises(RedisUnusable, match="is a node of a cluster"):
        connect(member.url, directory)
    member.close()


def test_no_password_of_a_url_is_shown() -> None:
    for url, shown in {
        "redis://h:1/2": "redis://h:1/2",
        "redis://user:secret@h": "redis://***@h",
        "rediss://h?password=secret&ssl_ca_certs=a": "rediss://h?password=***&ssl_ca_certs=a",
        "unix://:p@ss@/run/redis.sock": "unix://***@/run/redis.sock",
    }.items():
        assert without_passwords(url) == shown
