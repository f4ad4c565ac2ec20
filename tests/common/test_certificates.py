"""TLS on real sockets: accepted and rejected clients, and the replacement of certificates."""

from __future__ import annotations

import logging
import ssl
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path

import grpc
import grpc.aio
import pytest
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.certificates import CertificateFiles, Changed
from common.errors import StartupError
from common.rpc import CHANNEL_OPTIONS, Protection, RpcServer, open_channel
from common.trust import NO_TRUST, Trust, TrustFiles, files_of
from gateway.settings import GatewaySettings
from looseleaf.cli import main
from looseleaf.commands.certs import make

DAY = timedelta(days=1)


def trust_in(directory: Path) -> Trust:
    return TrustFiles(None, directory / "inside.pem", directory / "inside.key", directory / "ca.pem").read()


@pytest.fixture
def certs(tmp_path: Path) -> Path:
    directory = tmp_path / "certs"
    assert main(["certs", str(directory), "--host", "gateway.example", "--host", "192.0.2.7"]) == 0
    return directory


@pytest.fixture
async def serve(certs: Path) -> AsyncIterator[Callable[[CertificateFiles | None], RpcServer]]:
    servers: list[RpcServer] = []

    def begin(files: CertificateFiles | None) -> RpcServer:
        server = RpcServer("127.0.0.1", 0, protection=Protection(credentials=files and files.server_credentials()))
        servers.append(server)
        return server

    yield begin
    for server in servers:
        await server.stop(0)


async def answers(channel: grpc.aio.Channel) -> bool:
    async with channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE, error
            return False
    return True


async def test_inside_both_sides_show_a_certificate_of_one_ca(certs: Path, tmp_path: Path, serve: Callable) -> None:
    trust = trust_in(certs)
    server = serve(trust.certificates)
    await server.start()
    address = f"127.0.0.1:{server.port}"
    assert await answers(open_channel(address, trust))
    (tmp_path / "other").mkdir()
    make(tmp_path / "other", [], DAY)
    assert not await answers(open_channel(address, trust_in(tmp_path / "other"))), "another CA"
    assert not await answers(open_channel(address, NO_TRUST)), "no TLS"
    nobody = grpc.ssl_channel_credentials((certs / "ca.pem").read_bytes())
    options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", "looseleaf.internal")]
    assert not await answers(grpc.aio.secure_channel(address, nobody, options=options)), "no certificate of its own"
    plain = serve(None)
    await plain.start()
    assert not await answers(open_channel(f"127.0.0.1:{plain.port}", trust)), "a server without TLS"


async def test_a_certificate_for_the_front_is_no_services_certificate(certs: Path, serve: Callable) -> None:
    """The certificate is from the same CA, but lacks the services' name, so its owner cannot pretend to be a worker."""
    server = serve(CertificateFiles(certs / "front.pem", certs / "front.key", certs / "ca.pem"))
    await server.start()
    assert not await answers(open_channel(f"127.0.0.1:{server.port}", trust_in(certs)))


async def test_new_connections_see_new_certificates(certs: Path, tmp_path: Path, serve: Callable) -> None:
    """The certificates of a running server are replaced by those of a different CA. A pair that is only half replaced
    has no effect."""
    old = trust_in(certs)
    assert old.certificates is not None
    server = serve(old.certificates)
    await server.start()
    address = f"127.0.0.1:{server.port}"
    kept = open_channel(address, old)
    health = health_pb2_grpc.HealthStub(kept)
    await health.Check(health_pb2.HealthCheckRequest(), timeout=60)
    other = tmp_path / "other"
    other.mkdir()
    make(other, [], DAY)
    before = {path.name: path.read_bytes() for path in certs.iterdir()}
    (certs / "inside.key").write_bytes((other / "inside.key").read_bytes())
    assert await answers(grpc.aio.secure_channel(
        address,
        grpc.ssl_channel_credentials(before["ca.pem"], before["inside.key"], before["inside.pem"]),
        options=[*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", "looseleaf.internal")],
    )), "a key without its certificate"  # fmt: skip
    for name in ("inside.pem", "ca.pem"):
        (certs / name).write_bytes((other / name).read_bytes())
    assert await answers(open_channel(address, trust_in(other)))
    await health.Check(health_pb2.HealthCheckRequest(), timeout=60)  # open connections stay open
    await kept.close()


def test_what_is_no_certificate_is_refused_and_what_others_read_is_told(
    certs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "bad").write_text("no pem")
    for files in (
        CertificateFiles(tmp_path / "none", certs / "inside.key"),
        CertificateFiles(tmp_path / "bad", certs / "inside.key"),
        CertificateFiles(certs / "inside.pem", certs / "front.key"),
        CertificateFiles(certs / "inside.pem", certs / "inside.key", tmp_path / "bad"),
    ):
        with pytest.raises(StartupError, match="certificate"):
            files.check()
    with pytest.raises(StartupError, match="must be given together"):
        TrustFiles(None, certs / "inside.pem", certs / "inside.key").read()
    assert caplog.records == []
    (certs / "inside.key").chmod(0o644)
    trust_in(certs)
    assert "has mode 0644: others can access it" in caplog.text


def test_a_change_is_seen_once_and_a_bad_one_told_once(certs: Path, caplog: pytest.LogCaptureFixture) -> None:
    changed = Changed(CertificateFiles(certs / "front.pem", certs / "front.key"))
    assert not changed()
    (certs / "front.key").write_text("half")
    with caplog.at_level(logging.ERROR):
        assert [changed() for _ in range(3)] == [False] * 3
    assert len(caplog.records) == 1
    make(certs, [], DAY)
    assert [changed() for _ in range(3)] == [True, False, False]


def test_the_certificates_that_certs_makes(certs: Path) -> None:
    assert {path.name for path in certs.iterdir()} == {
        "ca.pem", "ca.key", "inside.pem", "inside.key", "front.pem", "front.key",
    }  # fmt: skip
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in certs.iterdir())
    names = x509.load_pem_x509_certificate((certs / "front.pem").read_bytes()).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    assert {"localhost", "gateway.example"} <= set(names.value.get_values_for_type(x509.DNSName))
    assert {"127.0.0.1", "192.0.2.7"} <= set(map(str, names.value.get_values_for_type(x509.IPAddress)))
    authority, front = (certs / "ca.pem").read_bytes(), (certs / "front.pem").read_bytes()
    assert main(["certs", str(certs), "--missing"]) == 0
    assert (certs / "front.pem").read_bytes() == front
    assert main(["certs", str(certs)]) == 0
    assert (certs / "ca.pem").read_bytes() == authority and (certs / "front.pem").read_bytes() != front
    ssl.create_default_context(cafile=str(certs / "ca.pem")).load_cert_chain(certs / "front.pem", certs / "front.key")


def test_a_secret_that_kubernetes_replaces_is_read_from_its_new_directory(tmp_path: Path) -> None:
    """The kubelet mounts `secret` as a link through `..data`, and replaces `..data` at once."""
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "secret").write_text(f"the-{name}-secret-of-a-launch")
    (tmp_path / "secret").symlink_to("..data/secret")
    (tmp_path / "..data").symlink_to("old")
    settings = GatewaySettings.model_construct(
        secret_file=tmp_path / "secret", tls_cert=None, tls_key=None, tls_ca=None
    )
    files = files_of(settings)
    assert files.read().secret == "the-old-secret-of-a-launch"
    (tmp_path / "..data").unlink()
    (tmp_path / "..data").symlink_to("new")
    (tmp_path / "old" / "secret").unlink()
    assert files.read().secret == "the-new-secret-of-a-launch"
