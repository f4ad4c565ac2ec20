"""Decodes one field of a body to the field's type. An error names the field and, if a value in it has the wrong type,
the position of the value.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from common.errors import InvalidArgument, LooseleafError
from gateway.api.body_fields import UNKNOWN, not_json

MAX_INTEGRAL_BYTES = 1 << 20
"""The maximum size in bytes of a field in which numbers such as 2.0 are accepted as integers."""
_PATH = re.compile(r"(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?", re.DOTALL)
_FLOAT_FOR_INT = re.compile(r"Expected `[^`]*\bint\b[^`]*`, got `float`")
_MISSING = re.compile(r"Object missing required field `(?P<field>.*)`", re.DOTALL)
ANY = msgspec.json.Decoder()


def decoded(name: str, part: bytes | msgspec.Raw, decoder: msgspec.json.Decoder[Any]) -> Any:
    try:
        return decoder.decode(part)
    except msgspec.ValidationError as error:
        if _FLOAT_FOR_INT.match(str(error)[:200]) and memoryview(part).nbytes <= MAX_INTEGRAL_BYTES:
            return _decoded_integral(name, part, decoder)
        raise _violation(name, str(error)[:1000]) from None
    except (ValueError, RecursionError) as error:
        raise not_json(name, error) from None


def _decoded_integral(name: str, part: bytes | msgspec.Raw, decoder: msgspec.json.Decoder[Any]) -> Any:
    """Decodes a field in which integers may be written as numbers such as 2.0."""
    try:
        return decoder.decode(msgspec.json.encode(_integral(ANY.decode(part))))
    except msgspec.ValidationError as error:
        raise _violation(name, str(error)[:1000]) from None
    except (ValueError, RecursionError) as error:
        raise not_json(name, error) from None


def _integral(value: Any) -> Any:
    """Returns the value with every float that is an exact 64-bit integer converted to int."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 2**63 else value
    if isinstance(value, list):
        return [_integral(item) for item in value]
    return {key: _integral(item) for key, item in value.items()} if isinstance(value, dict) else value


def _violation(name: str, message: str) -> LooseleafError:
    """Converts msgspec's message to a LooseleafError. The path within the field becomes part of the field's name."""
    found = _PATH.fullmatch(message)
    assert found is not None  # the pattern matches anything
    name += (found["path"] or "").replace("[...]", "")
    if unknown := UNKNOWN.fullmatch(found["what"]):
        return InvalidArgument.of(f"{name}.{unknown['field'][:100]}", "is not a known field")
    if missing := _MISSING.fullmatch(found["what"]):
        return InvalidArgument.of(f"{name}.{missing['field']}", "must be given")
    what = found["what"].replace("`", "")
    return InvalidArgument.of(name, f"is invalid: {what[:1].lower()}{what[1:200]}")
