"""`looseleaf health [ADDRESS]`: asks any service, over gRPC's standard health service, whether it is ready."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import Field
from pydantic_settings import CliPositionalArg

from common.certificates import front_credentials
from common.rpc import open_blocking_channel
from common.settings import Settings, settings_config
from common.trust import TrustFiles


class HealthSettings(Settings):
    """Flags of `looseleaf health`. Its exit status is 0 if the service at ADDRESS is ready to serve, and 1 if not."""

    model_config = settings_config("LOOSELEAF_HEALTH_", "looseleaf health")

    address: CliPositionalArg[str] = Field("127.0.0.1:50051", description="host:port of a service's gRPC")
    service: str = Field("", description="full name of one of its gRPC services; default: the whole process")
    tls_ca: Path | None = Field(None, description="use TLS; the service has a certificate of the CA in this PEM file")
    tls_cert: Path | None = Field(None, description="certificate to present to an internal service")
    tls_key: Path | None = Field(None, description="private key of that certificate")
    timeout: float = Field(3.0, gt=0, description="seconds to wait for the answer")


def run(argv: Sequence[str]) -> int:
    settings = HealthSettings.load(argv)
    with open_for(settings) as channel:
        state = state_of(channel, settings.service, settings.timeout)
    ready = state == "SERVING"
    print(f"{settings.address} {state}", file=sys.stdout if ready else sys.stderr)
    return 0 if ready else 1


def open_for(settings: HealthSettings) -> grpc.Channel:
    """Opens a channel to the service. Raises StartupError if a TLS file cannot be used."""
    if settings.tls_ca is not None and settings.tls_cert is None:
        return grpc.secure_channel(settings.address, front_credentials(settings.tls_ca))
    files = TrustFiles(None, settings.tls_cert, settings.tls_key, settings.tls_ca)
    return open_blocking_channel(settings.address, files.read())


def state_of(channel: grpc.Channel, service: str, timeout_s: float) -> str:
    """Returns the reported health, such as SERVING, or the name of the gRPC status if the call fails."""
    stub = cast(Any, health_pb2_grpc.HealthStub)(channel)
    try:
        reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
    except grpc.RpcError as error:
        return str(cast(Any, error).code().name)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))
