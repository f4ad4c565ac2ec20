"""Two hosts whose services use mutual TLS between each other, listen on all interfaces, and announce an address."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import grpc
import pytest

from common.types import SamplingParams, StoppingParams
from looseleaf import AsyncClient
from looseleaf.commands.certs import make
from testing.chaos.book import make_oracle
from testing.chaos.stack import free_ports
from testing.system import prompts
from testing.two_hosts import LINK, TwoHosts, namespaces_work

NAMES = ("store-a", "prefill-a", "store-b", "decode-b")
LISTEN = "0A"  # the state in /proc/net/tcp


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certs")
    make(directory, [], timedelta(days=1))
    return directory


@pytest.fixture(scope="module")
def announced() -> dict[str, str]:
    """The address that each service announces with `--advertise`."""
    spaces, ports = namespaces_work(), free_ports(len(NAMES))
    hosts = [LINK["ab".index(name[-1])] if spaces else "127.0.0.1" for name in NAMES]
    return {name: f"{host}:{port}" for name, host, port in zip(NAMES, hosts, ports, strict=True)}


@pytest.fixture(scope="module")
def hosts(checkpoint: Path, certs: Path, announced: dict[str, str]) -> Iterator[TwoHosts]:
    tls = {"tls_cert": f"{certs}/inside.pem", "tls_key": f"{certs}/inside.key", "tls_ca": f"{certs}/ca.pem"}
    flags: dict[str, dict[str, object]] = {kind: {**tls} for kind in ("store", "prefill", "decode", "gateway")}
    for name, address in announced.items():
        flags[name] = {"host": "0.0.0.0", "port": address.rpartition(":")[2], "advertise": address}
    with TwoHosts(checkpoint, namespaces=namespaces_work(), flags=flags) as running:
        yield running


async def test_blocks_travel_over_byte_channels_with_tls(
    hosts: TwoHosts, checkpoint: Path, announced: dict[str, str]
) -> None:
    wanted, oracle = prompts(8, seed=1, lengths=(20, 300)), make_oracle(checkpoint)
    greedy, stopping = SamplingParams(temperature=0.0), StoppingParams(max_tokens=16)
    async with AsyncClient(hosts.grpc) as client:
        calls = [client.generate(p, max_tokens=16, ignore_eos=True, temperature=0.0, timeout=60) for p in wanted]
        answers = await asyncio.gather(*calls)
    assert [done.token_ids for done in answers] == [tuple(oracle.generate(p, greedy, stopping)) for p in wanted]
    assert [done.usage.transferred_tokens for done in answers] == list(map(len, wanted))
    assert "blocks over gRPC" not in hosts.log("store-b"), "the byte channel was used"
    assert hosts.block_stores == (announced["store-a"], announced["store-b"])
    hosts.assert_nothing_held()


def test_no_service_answers_a_caller_without_a_certificate(
    hosts: TwoHosts, certs: Path, announced: dict[str, str]
) -> None:
    ca = grpc.ssl_channel_credentials((certs / "ca.pem").read_bytes())
    override = (("grpc.ssl_target_name_override", "looseleaf.internal"),)
    for address in announced.values():
        for channel in (grpc.insecure_channel(address), grpc.secure_channel(address, ca, override)):
            with channel, pytest.raises(grpc.RpcError) as refusal:
                channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=60)
            assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE


def test_every_port_of_a_host_presents_the_certificate(hosts: TwoHosts, certs: Path, announced: dict[str, str]) -> None:
    """The ports of host A are those of the block store, its byte channels and prefill, and the gateway's two, on which
    clients call.
    """
    if hosts.spaces is None:
        pytest.skip("without namespaces, other processes listen on this host too")
    tables = [Path(f"/proc/{hosts.processes['store-a'].pid}/net/{name}") for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.read_text().splitlines()[1:]]
    listening = {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == LISTEN}
    ports = listening - {int(address.rpartition(":")[2]) for address in (hosts.http, hosts.grpc)}
    assert len(ports) == 3 and {int(announced[name].rpartition(":")[2]) for name in ("store-a", "prefill-a")} < ports
    inside = ssl.PEM_cert_to_DER_cert((certs / "inside.pem").read_text())
    for port in ports:
        assert ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((LINK[0], port))) == inside
