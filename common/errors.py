"""The errors that cross service boundaries, with their gRPC and HTTP statuses.

    LooseleafError
    ├── InvalidArgument      bad parameter, prompt too long      INVALID_ARGUMENT     400
    ├── NotFound             unknown model                       NOT_FOUND            404
    ├── Unauthenticated      missing or bad credential           UNAUTHENTICATED      401
    ├── PermissionDenied     action not allowed to the caller    PERMISSION_DENIED    403
    ├── ResourceExhausted    queue full, quota                   RESOURCE_EXHAUSTED   429
    ├── Unavailable          no worker, draining                 UNAVAILABLE          503
    ├── FailedPrecondition   incompatible services or settings   FAILED_PRECONDITION  500
    ├── Unimplemented        valid, but not supported            UNIMPLEMENTED        400
    ├── Aborted              fenced, stale, lost KV (internal)   ABORTED              500
    ├── DeadlineExceeded     out of time                         DEADLINE_EXCEEDED    504
    ├── Cancelled            the client has disconnected         CANCELLED            499
    └── Internal             a bug in Looseleaf                  INTERNAL             500

A message is one sentence for the client. It names the field and the limit if there are any, and does not contain the
text of an unexpected exception.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """An invalid field of a request, and the reason."""

    field: str
    description: str
    reason: str | None = None
    """OpenAI's code for the error, or None if OpenAI has none."""


class LooseleafError(Exception):
    """The base class of errors with a gRPC and an HTTP status. `grpc_code` names a member of `grpc.StatusCode`."""

    grpc_code = "INTERNAL"
    http_status = 500
    kind = "internal_error"
    own_code: str | None = None
    """The `code` of an error whose first violation has no reason. None means the gRPC status in lower case."""

    def __init__(
        self,
        message: str,
        *,
        violations: tuple[FieldViolation, ...] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.violations = violations
        self.retry_after_s = retry_after_s

    @property
    def code(self) -> str:
        """The code in OpenAI's error object: the first violation's reason, otherwise `own_code`, otherwise the gRPC
        status in lower case.
        """
        reason = self.violations[0].reason if self.violations else None
        return reason or self.own_code or self.grpc_code.lower()


class InvalidArgument(LooseleafError):
    grpc_code, http_status, kind = "INVALID_ARGUMENT", 400, "invalid_request_error"

    @classmethod
    def of(cls, field: str, description: str, reason: str | None = None) -> InvalidArgument:
        """Returns the error for one invalid field. `reason` is OpenAI's own error code."""
        return cls(f"{field} {description}", violations=(FieldViolation(field, description, reason),))


class NotFound(LooseleafError):
    grpc_code, http_status, kind = "NOT_FOUND", 404, "not_found_error"


class ModelNotFound(NotFound):
    """The error for a model that is not served."""

    kind, own_code = "invalid_request_error", "model_not_found"


class Unauthenticated(LooseleafError):
    grpc_code, http_status, kind = "UNAUTHENTICATED", 401, "invalid_request_error"
    own_code = "invalid_api_key"


class PermissionDenied(LooseleafError):
    grpc_code, http_status, kind = "PERMISSION_DENIED", 403, "permission_error"


class ResourceExhausted(LooseleafError):
    grpc_code, http_status, kind = "RESOURCE_EXHAUSTED", 429, "rate_limit_error"


class Unavailable(LooseleafError):
    grpc_code, http_status, kind = "UNAVAILABLE", 503, "service_unavailable_error"


class FailedPrecondition(LooseleafError):
    grpc_code, http_status, kind = "FAILED_PRECONDITION", 500, "internal_error"


class Unimplemented(LooseleafError):
    """The error for a valid parameter that this version does not support. The HTTP status is 400, as OpenAI clients
    expect for a bad parameter.
    """

    grpc_code, http_status, kind = "UNIMPLEMENTED", 400, "invalid_request_error"

    @classmethod
    def of(cls, field: str, description: str = "is not supported yet") -> Unimplemented:
        """Returns the error for one field that is not supported."""
        return cls(f"{field} {description}", violations=(FieldViolation(field, description),))


class Aborted(LooseleafError):
    grpc_code, http_status, kind = "ABORTED", 500, "internal_error"


class DeadlineExceeded(LooseleafError):
    grpc_code, http_status, kind = "DEADLINE_EXCEEDED", 504, "timeout_error"


class Cancelled(LooseleafError):
    grpc_code, http_status, kind = "CANCELLED", 499, "cancelled"


class Internal(LooseleafError):
    grpc_code, http_status, kind = "INTERNAL", 500, "internal_error"


ALL_ERRORS: tuple[type[LooseleafError], ...] = (
    InvalidArgument,
    NotFound,
    Unauthenticated,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
    FailedPrecondition,
    Unimplemented,
    Aborted,
    DeadlineExceeded,
    Cancelled,
    Internal,
)
BY_GRPC_CODE: dict[str, type[LooseleafError]] = {error.grpc_code: error for error in ALL_ERRORS}


class StartupError(Exception):
    """The error for a service that cannot start. Its message is for the user."""
