"""Converts errors to `google.rpc.Status` and back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from common.errors import BY_GRPC_CODE, FieldViolation, Internal, LooseleafError

MAX_VIOLATIONS = 16
"""Maximum number of violations in a status, which is sent in the trailer. gRPC drops a trailer of more than 8 KiB."""


def status_of(error: LooseleafError) -> status_pb2.Status:
    """Returns the google.rpc.Status of an error, with field violations and retry delay as details."""
    details: list[any_pb2.Any] = []
    if error.violations:
        violations = [
            error_details_pb2.BadRequest.FieldViolation(
                field=v.field[:100], description=v.description[:200], reason=(v.reason or "").upper()
            )
            for v in error.violations[:MAX_VIOLATIONS]
        ]
        details.append(_packed(error_details_pb2.BadRequest(field_violations=violations)))
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    return status_pb2.Status(code=code_pb2.Code.Value(error.grpc_code), message=error.message[:1000], details=details)


def _packed(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def error_of(error: grpc.RpcError) -> LooseleafError:
    """Returns the LooseleafError of a failed call, from the call's status and its details."""
    code: grpc.StatusCode = error.code()
    kind = BY_GRPC_CODE.get(code.name, Internal)
    violations: list[FieldViolation] = []
    retry_after_s: float | None = None
    status = _status_details(error)
    for detail in status.details if status is not None else ():
        bad_request = error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(bad_request):
            violations += [
                FieldViolation(v.field, v.description, v.reason.lower() or None) for v in bad_request.field_violations
            ]
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    return kind(error.details() or code.name, violations=tuple(violations), retry_after_s=retry_after_s)


def _status_details(error: grpc.RpcError) -> status_pb2.Status | None:
    metadata: Iterable[Any] = error.trailing_metadata() or ()
    for key, value in metadata:
        if key == "grpc-status-details-bin":
            return status_pb2.Status.FromString(value)
    return None
