"""The access policy: it names every RPC method, and every service requires the deployment's secret."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pool import Default
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

import protos.v1
from common.access import POLICY, SECRET_HEADER, Access, Door
from common.errors import StartupError
from common.rpc import Protection, RpcServer
from common.secret_files import read_secret, write_secret
from common.service_main import internal_server
from common.settings import ServerSettings, settings_config
from common.trust import is_loopback
from protos.v1 import block_store_pb2, block_store_pb2_grpc, decode_pb2, inference_pb2, prefill_pb2

SECRET = "0123456789abcdef"
OURS = (block_store_pb2, decode_pb2, inference_pb2, prefill_pb2)


class AnySettings(ServerSettings):
    model_config = settings_config("LOOSELEAF_ANY_", "any")


def methods(file: FileDescriptor) -> Iterator[str]:
    for name, service in file.services_by_name.items():
        yield from (f"/{file.package}.{name}/{method.name}" for method in service.methods)


def test_the_policy_names_every_method_of_every_service() -> None:
    """A new RPC that is missing from the policy is treated as internal, and this test fails until it is added."""
    files = sorted(path.stem for path in Path(protos.v1.__path__[0]).glob("*.proto"))
    with_services = [f for f in files if Default().FindFileByName(f"protos/v1/{f}.proto").services_by_name]
    assert with_services == sorted(module.DESCRIPTOR.name.split("/")[-1][:-6] for module in OURS)
    ours = {method for module in OURS for method in methods(module.DESCRIPTOR)}
    theirs = {*methods(health_pb2.DESCRIPTOR), *methods(reflection_pb2.DESCRIPTOR)}
    assert ours == {method for method in POLICY if method.startswith("/looseleaf.")}
    assert theirs <= set(POLICY)
    public = {method for method in ours if POLICY[method] is Access.PUBLIC}
    assert public == set(methods(inference_pb2.DESCRIPTOR)), "only the gateway's are public"


class Store(block_store_pb2_grpc.BlockStoreServiceServicer):
    """A service that counts the accepted calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    async def Inspect(self, request: object, context: object) -> block_store_pb2.InspectResponse:
        self.num_calls += 1
        return block_store_pb2.InspectResponse()


@pytest.fixture
async def served() -> AsyncIterator[tuple[RpcServer, Store, Door]]:
    store, door = Store(), Door(SECRET)
    server = RpcServer("127.0.0.1", 0, protection=Protection(door))
    server.add(block_store_pb2_grpc.add_BlockStoreServiceServicer_to_server, store, "looseleaf.v1.BlockStoreService")
    await server.start()
    yield server, store, door
    await server.stop(0)


async def code_of(port: int, method: str, message: bytes, secret: str | None) -> grpc.StatusCode:
    return await asyncio.to_thread(blocking_code_of, port, method, message, secret)


def blocking_code_of(port: int, method: str, message: bytes, secret: str | None) -> grpc.StatusCode:
    """Returns the status of a blocking call. In grpc.aio, a write at the end of a call sometimes fails with
    INTERNAL.
    """
    metadata = () if secret is None else ((SECRET_HEADER, secret),)
    with grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.max_send_message_length", -1)]) as channel:
        try:
            next(channel.stream_stream(method)(iter([message]), metadata=metadata, timeout=60), None)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("secret", [None, "", "x", SECRET[:-1], SECRET + "0", SECRET.upper()])
async def test_without_the_secret_nothing_but_health_is_answered(
    served: tuple[RpcServer, Store, Door], secret: str | None
) -> None:
    server, store, door = served
    for method, access in POLICY.items():
        if access is not Access.PUBLIC:
            for message in (b"", b"\x0b not a message"):
                assert await code_of(server.port, method, message, secret) is grpc.StatusCode.UNAUTHENTICATED, method
    assert await code_of(server.port, "/looseleaf.v1.New/Method", b"", secret) is grpc.StatusCode.UNAUTHENTICATED
    assert await code_of(server.port, "/grpc.health.v1.Health/Check", b"", secret) is grpc.StatusCode.OK
    assert store.num_calls == 0 and door.fallbacks.counts["internal call refused"] >= 13


async def test_with_the_secret_it_is(served: tuple[RpcServer, Store, Door]) -> None:
    server, store, _ = served
    inspect = "/looseleaf.v1.BlockStoreService/Inspect"
    assert await code_of(server.port, inspect, b"", SECRET) is grpc.StatusCode.OK
    assert store.num_calls == 1
    reflect = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    assert await code_of(server.port, reflect, b"", SECRET) is grpc.StatusCode.OK


async def test_a_large_message_is_refused_unread(served: tuple[RpcServer, Store, Door]) -> None:
    """The sender is rejected before the first byte is read. If the 65 MB were read, the status would be
    RESOURCE_EXHAUSTED."""
    code = await code_of(served[0].port, "/looseleaf.v1.BlockStoreService/Inspect", bytes(65 << 20), None)
    assert code is grpc.StatusCode.UNAUTHENTICATED


async def test_reflection_can_be_switched_off() -> None:
    server = RpcServer("127.0.0.1", 0, protection=Protection(reflection=False))
    await server.start()
    reflect = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    assert await code_of(server.port, reflect, b"", None) is grpc.StatusCode.UNIMPLEMENTED
    assert await code_of(server.port, "/grpc.health.v1.Health/Check", b"", None) is grpc.StatusCode.OK
    await server.stop(0)


async def test_a_server_that_others_reach_needs_a_secret(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for host in ("0.0.0.0", "::", "", "192.0.2.1", "example.org"):
        with pytest.raises(StartupError, match="needs a --secret-file"):
            internal_server(AnySettings(host=host))
    internal_server(AnySettings())
    assert "every process on this machine may make internal calls" in caplog.text
    write_secret(tmp_path / "secret")
    internal_server(AnySettings(host="0.0.0.0", secret_file=tmp_path / "secret"))


def test_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "", "10.0.0.1", "localhost.example.org", "127.0.0.1.nip.io")))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file that root owns")
def test_the_group_may_read_a_secret_that_root_owns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "secret"
    write_secret(path)
    monkeypatch.setattr(os, "geteuid", lambda: 10001)
    for mode, warns in ((0o440, False), (0o640, False), (0o660, True), (0o444, True)):
        caplog.clear()
        path.chmod(mode)
        read_secret(path)
        assert bool(caplog.records) is warns, oct(mode)


def test_a_secret_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "secret"
    secret = write_secret(path)
    assert path.stat().st_mode & 0o777 == 0o600 and len(secret) == 64 and read_secret(path) == secret
    with pytest.raises(FileExistsError):
        write_secret(path)
    assert caplog.records == []
    for mode in (0o640, 0o622):
        path.chmod(mode)
        with caplog.at_level(logging.WARNING):
            assert read_secret(path) == secret
        assert f"has mode {mode:04o}: others can access it" in caplog.text and secret not in caplog.text
    for bad in ("short", "", "two words of it here", "ümlaut" * 5, "x" * 20 + "\x1b"):
        path.write_text(bad)
        with pytest.raises(StartupError, match="--secret-file"):
            read_secret(path)
    with pytest.raises(StartupError, match="cannot be read"):
        read_secret(tmp_path / "none")
