"""`looseleaf health [ADDRESS]`: ask any of the services, over gRPC's standard health service, whether it is ready."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import Field
from pydantic_settings import CliPositionalArg

from common.settings import Settings, settings_config


class HealthSettings(Settings):
    """Exit status 0 if the service at ADDRESS is ready to serve, 1 if not."""

    model_config = settings_config("LOOSELEAF_HEALTH_", "looseleaf health")

    address: CliPositionalArg[str] = Field("127.0.0.1:50051", description="host:port of a service's gRPC")
    service: str = Field("", description="full name of one gRPC service there; default: the whole process")
    timeout: float = Field(3.0, gt=0, description="seconds to wait for the answer")


def run(argv: Sequence[str]) -> int:
    settings = HealthSettings.load(argv)
    state = state_of(settings.address, settings.service, settings.timeout)
    ready = state == "SERVING"
    print(f"{settings.address} {state}", file=sys.stdout if ready else sys.stderr)
    return 0 if ready else 1


def state_of(address: str, service: str, timeout_s: float) -> str:
    """SERVING, NOT_SERVING, SERVICE_UNKNOWN, or the name of the status with which the call failed."""
    with grpc.insecure_channel(address) as channel:
        stub = cast(Any, health_pb2_grpc.HealthStub)(channel)
        try:
            reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.RpcError as error:
            return str(cast(Any, error).code().name)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))
