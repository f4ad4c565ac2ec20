"""Opens the ports at which a gateway speaks vLLM's gRPC protocol. There is one port for each role, because a router
distinguishes roles by their addresses.

The protocol's messages come from the package smg-grpc-proto, so this module can be imported only with the extra `smg`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from smg_grpc_proto import vllm_engine_pb2_grpc

from common.errors import StartupError
from common.guard import Check, Context
from common.rpc import Protection, RpcServer, host_port
from common.trust import is_loopback
from gateway.api.credentials import Authenticator, KeylessAuthenticator
from gateway.api.front import Front
from gateway.fleet.block_feed import BlockFeed
from gateway.fleet.workers import Workers
from gateway.settings import GatewaySettings
from gateway.vllm_grpc.about import About, Role
from gateway.vllm_grpc.service import VllmServicer

SERVICE = "vllm.grpc.engine.VllmEngine"


class VllmPorts:
    """The gRPC servers of all roles. The constructor binds their ports, and the caller starts them."""

    def __init__(
        self,
        settings: GatewaySettings,
        authenticator: Authenticator,
        check_of: Callable[[Authenticator], Check],
        protection: Protection,
    ) -> None:
        """`check_of` returns the check for the callers that an authenticator accepts. Raises StartupError if a port
        cannot be bound, or if other machines could call a port without a key.
        """
        self._host, tenant = settings.vllm_grpc_host, settings.vllm_grpc_tenant
        if not is_loopback(self._host) and (tenant is not None or not authenticator.needs_key):
            raise StartupError(f"--vllm-grpc-host {self._host}: without keys, only loopback addresses are allowed")
        self._authenticator = authenticator if tenant is None else KeylessAuthenticator(authenticator, tenant)
        check = _except_health(check_of(self._authenticator))
        ports: dict[Role, int] = {
            "regular": settings.vllm_grpc_port,
            "prefill": settings.vllm_grpc_prefill_port,
            "decode": settings.vllm_grpc_decode_port,
        }
        self._by_role = {
            role: RpcServer(self._host, port, check=check, protection=protection) for role, port in ports.items()
        }
        for server in self.servers:
            server.bind()

    @property
    def servers(self) -> Sequence[RpcServer]:
        return list(self._by_role.values())

    @property
    def addresses(self) -> list[str]:
        """The addresses for whole requests, for prefill and for decode, in this order."""
        return [host_port(self._host, server.port) for server in self.servers]

    def add_services(self, front: Front, workers: Workers, model_directory: str, feed: BlockFeed) -> None:
        """Registers the service of each role, which serves the model in this directory and announces blocks from
        `feed`.
        """
        about = About(front.assets, model_directory, workers)
        front = replace(front, authenticator=self._authenticator)
        for role, server in self._by_role.items():
            servicer = VllmServicer(role, front, workers, about, feed)
            server.add(vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server, servicer, SERVICE)


def _except_health(check: Check) -> Check:
    """Returns `check` with one exception: the health check needs no key."""

    def wrapped(method: str, context: Context) -> None:
        if method != f"/{SERVICE}/HealthCheck":
            check(method, context)

    return wrapped
