"""A whole deployment over TLS: mutual TLS inside, HTTPS and gRPC for clients, certificates replaced at run time."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import grpc
import httpx
import pytest

from common.errors import StartupError, Unavailable
from looseleaf import LLM, AsyncClient, Client
from looseleaf.cli import main
from looseleaf.commands.certs import make
from testing.system import assert_nothing_held, wait_for

PROMPT = list(range(20, 60))


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certs")
    make(directory, [], timedelta(days=1))
    return directory


@pytest.fixture(scope="module")
def llm(checkpoint: Path, certs: Path) -> Iterator[LLM]:
    front = {"ssl_certfile": f"{certs}/front.pem", "ssl_keyfile": f"{certs}/front.key"}
    inside = {"tls_cert": f"{certs}/inside.pem", "tls_key": f"{certs}/inside.key", "tls_ca": f"{certs}/ca.pem"}
    with LLM(str(checkpoint), num_blocks=512, max_model_len=1024, roles="split", **front, **inside) as running:
        yield running


def shown_certificate(address: str) -> str:
    """Returns the certificate that a new connection receives."""
    host, _, port = address.rpartition(":")
    return ssl.get_server_certificate((host, int(port)))


async def test_answers_over_grpc_and_https_and_none_without_tls(llm: LLM, certs: Path) -> None:
    expected = llm.client.generate(PROMPT, max_tokens=8, temperature=0.0)
    async with AsyncClient(llm.addresses.grpc, tls_ca=certs / "ca.pem") as client:
        assert (await client.generate(PROMPT, max_tokens=8, temperature=0.0)).token_ids == expected.token_ids
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    with httpx.Client(verify=ssl.create_default_context(cafile=str(certs / "ca.pem")), timeout=60) as https:
        reply = https.post(f"https://{llm.addresses.http}/v1/completions", json=body)
        assert reply.status_code == 200 and reply.json()["choices"][0]["text"] == expected.text
        with https.stream("POST", f"https://{llm.addresses.http}/v1/completions", json=body | {"stream": True}) as s:
            assert list(s.iter_lines())[-2:] == ["data: [DONE]", ""]
    assert sum(llm.requests_by_worker().values()) >= 8  # four requests, in two services each
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        httpx.get(f"https://{llm.addresses.http}/v1/models", timeout=60)
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://{llm.addresses.http}/v1/models", timeout=60)
    with Client(llm.addresses.grpc, timeout=60) as plain, pytest.raises(Unavailable):
        plain.generate(PROMPT, max_tokens=1)
    assert_nothing_held(llm.addresses.block_store)


def test_inside_nobody_without_a_certificate_gets_a_connection(llm: LLM, certs: Path) -> None:
    ca = grpc.ssl_channel_credentials((certs / "ca.pem").read_bytes())
    for name in ("block_store", "prefill", "decode"):
        address = llm.addresses.services[name]
        override = (("grpc.ssl_target_name_override", "looseleaf.internal"),)
        for channel in (grpc.insecure_channel(address), grpc.secure_channel(address, ca, override)):
            with channel, pytest.raises(grpc.RpcError) as refusal:
                channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=60)
            assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE


def test_the_operators_commands(llm: LLM, certs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["blocks", llm.addresses.block_store]) == 0
    front, store = llm.addresses.grpc, llm.addresses.block_store
    inside = ["--tls-cert", f"{certs}/inside.pem", "--tls-key", f"{certs}/inside.key", "--tls-ca", f"{certs}/ca.pem"]
    assert main(["health", front, "--tls-ca", f"{certs}/ca.pem"]) == 0
    assert main(["health", store, *inside]) == 0
    assert main(["health", store]) == 1 and main(["health", store, "--tls-ca", f"{certs}/ca.pem"]) == 1
    say = ["complete", "the mill", "--address", front, "--max-tokens", "4"]
    assert main([*say, "--tls-ca", f"{certs}/ca.pem"]) == 0 and main([*say, "--timeout", "3"]) == 1


def test_all_certificates_are_replaced_while_it_runs(llm: LLM, certs: Path) -> None:
    """All pairs are replaced by others of the same CA. Answers continue, and new connections get the new
    certificates."""
    expected = llm.client.generate(PROMPT, max_tokens=8, temperature=0.0).token_ids
    before = shown_certificate(llm.addresses.http), shown_certificate(llm.addresses.grpc)
    make(certs, [], timedelta(days=1))
    wait_for(lambda: shown_certificate(llm.addresses.http), lambda now: now != before[0], 60, "HTTPS shows the old one")
    wait_for(lambda: shown_certificate(llm.addresses.grpc), lambda now: now != before[1], 60, "gRPC shows the old one")
    for _ in range(5):
        with Client(llm.addresses.grpc, tls_ca=certs / "ca.pem") as client:
            assert client.generate(PROMPT, max_tokens=8, temperature=0.0).token_ids == expected
        time.sleep(0.3)
    assert_nothing_held(llm.addresses.block_store)


def test_half_of_the_files_is_refused(checkpoint: Path, certs: Path) -> None:
    for given in ({"ssl_certfile": f"{certs}/front.pem"}, {"tls_cert": f"{certs}/inside.pem"}):
        with pytest.raises(StartupError, match="must be given together"):
            LLM(str(checkpoint), num_blocks=64, **given)
