"""Finds the fields of a request body without decoding their values: the first pass of `openai_parse`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import msgspec

from common.errors import InvalidArgument
from gateway.api.openai_request import Body
from gateway.intake.limits import MAX_FIELD_BYTES

UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>.*)`", re.DOTALL)
"""Matches msgspec's message about an unknown field."""
_NAMES = msgspec.json.Decoder(dict[str, msgspec.Raw])


@cache
def required_of(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """Returns the names of the required fields of a body."""
    return tuple(field.name for field in msgspec.structs.fields(kind) if field.required)


def unsupported_of(kind: type[Body]) -> Mapping[str, Any]:
    """Returns the unsupported fields of a kind of body, each with its neutral value, which is accepted."""
    return {name: value for name, value in kind.unsupported.items() if name not in kind.__struct_fields__}


def not_json(name: str, error: ValueError | RecursionError) -> InvalidArgument:
    """Returns the error for bytes that msgspec cannot decode, which are the value of a field or the whole body."""
    if isinstance(error, RecursionError):
        return InvalidArgument.of(name, "must not be nested so deeply")
    return InvalidArgument.of(name, "must be valid JSON in UTF-8, without lone surrogates")


def fields_of(
    kind: type[Body], raw: bytes | bytearray, on_unknown: Callable[[str], None] | None
) -> Mapping[str, msgspec.Raw]:
    """Returns the raw values of the fields that the body contains, excluding ignored fields.

    Calls `on_unknown` with the name of each unknown top-level field. Raises InvalidArgument if the body is not a JSON
    object, if it has such a field and `on_unknown` is None, or if its unknown fields are too long.
    """
    try:
        try:
            found = _outline(kind).decode(raw)
        except msgspec.ValidationError as error:
            unknown = UNKNOWN.fullmatch(str(error)[:300])
            if unknown is None:
                raise InvalidArgument.of("body", "must be a JSON object") from None
            if on_unknown is None:
                raise InvalidArgument.of(unknown["field"][:100], "is not a known field") from None
            found = _without_unknown(kind, raw, on_unknown)
    except (ValueError, RecursionError) as error:
        raise not_json("body", error) from None
    ignored = kind.ignored.difference(kind.__struct_fields__)
    parts = {name: getattr(found, name) for name in found.__struct_fields__ if name not in ignored}
    return {name: part for name, part in parts.items() if part is not None}


def _without_unknown(kind: type[Body], raw: bytes | bytearray, on_unknown: Callable[[str], None]) -> Any:
    """Returns the raw fields of a body that has unknown fields, and reports the unknown names. Raises InvalidArgument
    if everything except the values of known fields exceeds `MAX_FIELD_BYTES`. This limit also bounds the number of
    names.
    """
    found = _outline(kind, strict=False).decode(raw)
    parts = [getattr(found, name) for name in found.__struct_fields__]
    known = sum(memoryview(part).nbytes for part in parts if part is not None)
    if len(raw) - known > MAX_FIELD_BYTES:
        raise InvalidArgument.of("body", f"has unknown fields of more than {MAX_FIELD_BYTES} bytes")
    for name in _NAMES.decode(raw):
        if name not in found.__struct_fields__:
            on_unknown(name)
    return found


@cache
def _outline(kind: type[Body], *, strict: bool = True) -> msgspec.json.Decoder[Any]:
    """Returns a decoder that finds the fields of a kind of body. If `strict` is set, the decoder fails at an unknown
    field.
    """
    names = dict.fromkeys((*kind.__struct_fields__, *kind.ignored, *kind.unsupported))
    fields: list[Any] = [(name, msgspec.Raw, None) for name in names]
    return msgspec.json.Decoder(msgspec.defstruct(kind.__name__, fields, forbid_unknown_fields=strict))
