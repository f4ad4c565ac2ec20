"""URLs of Redis servers: those that `redis-py` takes work, and each unusable one gets an error that names the fault."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import redis

from block_store.errors import RedisUnusable
from block_store.redis.redis_server import RedisHandle, connect
from block_store.redis.urls import client_of, without_passwords
from looseleaf.commands.certs import make
from testing.chaos.redis_process import RedisProcess
from testing.chaos.stack import free_ports
from testing.redis_sentinel import PASSWORD, SENTINEL_PASSWORD, SentinelGroup
from testing.redis_tls import TlsRedis, server_has
from testing.system import wait_for


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="ll-urls-"))
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[TlsRedis]:
    if not server_has("tls-cert-file"):
        pytest.skip("this redis-server was built without TLS; Debian's has it")
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
        f"rediss+sentinel://127.0.0.1/m?ssl_ca_cert={ours}/ca.pem": "cannot have the parameter 'ssl_ca_cert'",
        f"redis+sentinel://127.0.0.1/m?ssl_ca_certs={ours}/ca.pem": "cannot have the parameter 'ssl_ca_certs'",
        f"redis://127.0.0.1?ssl_ca_certs={ours}/ca.pem": "cannot have the parameter 'ssl_ca_certs'",
    }.items():
        with pytest.raises(RedisUnusable, match=fault) as refusal:
            connect(url, directory)
        assert server.password not in str(refusal.value)


def run_id(server: RedisProcess) -> str:
    return str(server.client.info("server")["run_id"])


@pytest.mark.parametrize("tls", [False, True])
def test_a_client_follows_the_master_that_the_sentinels_name(
    tls: bool, directory: Path, request: pytest.FixtureRequest
) -> None:
    """The old master is demoted and stays up. A client that expects it is refused by the new one until it follows."""
    certs = request.getfixturevalue("server").certs if tls else None
    (own := directory / f"sentinels-{tls}").mkdir()
    with SentinelGroup(own, certs) as group:
        handle = connect(group.url, own)
        assert handle.run_id == run_id(group.master) and handle.client.set("before", "1")
        group.switch()
        wait_for(lambda: is_refused(handle), bool, 30, "the old master still answers")
        assert handle.follow() and handle.run_id == run_id(group.replica)
        assert handle.client.set("after", "1") and group.replica.client.get("after") == b"1"
        handle.close()


def is_refused(handle: RedisHandle) -> bool:
    try:
        handle.client.set("again", "1")
    except redis.ConnectionError as error:
        return "this is not the Redis in which the ledger was built" in str(error)
    return False


def test_faults_of_a_sentinel_url_are_named_without_passwords(directory: Path) -> None:
    (own := directory / "sentinels").mkdir()
    with SentinelGroup(own) as group:
        nobody = "does not answer: no Sentinel names a master '{}' that is up; .*"
        for url, fault in {
            group.url.replace("/mymaster/", "/other/"): nobody.format("other") + "refused",
            group.url.replace(SENTINEL_PASSWORD, "wrong"): nobody.format("mymaster") + "invalid username-password pair",
            group.url.replace(PASSWORD, "wrong"): "does not answer: invalid username-password pair",
            f"redis+sentinel://:{PASSWORD}@127.0.0.1:1/m": nobody.format("m") + "refused",
        }.items():
            with pytest.raises(RedisUnusable, match=fault) as refusal:
                connect(url, own)
            assert not any(secret in str(refusal.value) for secret in (PASSWORD, SENTINEL_PASSWORD, "wrong@", "=wrong"))


@pytest.mark.parametrize(
    "url",
    [
        "nonsense", "nonsense://x", "redis://:secret@host:port", "host:6379", "redis+sentinel://:secret@host",
        "redis+sentinel://:secret@host:port/m", "redis+sentinel://one:1,/m", "redis+sentinel://one/m/db",
    ],
)  # fmt: skip
def test_a_malformed_url_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(RedisUnusable, match="a Redis URL must be redis://HOST:PORT") as refusal:
        client_of(url)
    assert "secret" not in str(refusal.value)


def test_a_cluster_is_refused(directory: Path) -> None:
    for scheme in ("redis", "rediss"):
        with pytest.raises(RedisUnusable, match="Redis Cluster is not supported"):
            connect(f"{scheme}+cluster://127.0.0.1:7000,127.0.0.1:7001", directory)
    if not server_has("cluster-port"):
        pytest.skip("this redis-server has no cluster-port: it is older than Redis 7")
    (node := directory / "node").mkdir()
    port, bus = map(str, free_ports(2))
    member = RedisProcess(node, ["--port", port, "--cluster-enabled", "yes", "--cluster-port", bus])
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
