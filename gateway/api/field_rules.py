"""Defines rules between the fields of a body. A body's class lists its rules, the parser checks them, and /openapi.json
describes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import InvalidArgument

NOT_NULL: Mapping[str, Any] = {"not": {"type": "null"}}


def has(field: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of the objects in which a field is present and matches the schema `value`."""
    return {"type": "object", "required": [field], "properties": {field: dict(value)}}


def both(*schemas: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of the objects that match all of these schemas."""
    return {"allOf": list(schemas)}


@dataclass(frozen=True, slots=True)
class Condition:
    """A statement about the value of a field, as code and as an equivalent JSON schema of the value."""

    field: str
    test: Callable[[Any], bool]
    value: Mapping[str, Any]

    def holds(self, body: Any) -> bool:
        return self.test(getattr(body, self.field))

    @property
    def schema(self) -> dict[str, Any]:
        """The schema of the objects for which the statement is true."""
        return has(self.field, self.value)


def given(field: str) -> Condition:
    """Returns the condition that a field has a value other than null."""
    return Condition(field, lambda value: value is not None, NOT_NULL)


def equals(field: str, wanted: bool | str) -> Condition:
    return Condition(field, lambda value: value == wanted, {"const": wanted})


def filled(field: str) -> Condition:
    """Returns the condition that a field holds a list that is not empty."""
    return Condition(field, bool, {"type": "array", "minItems": 1})


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule between fields: if all conditions of `when` hold, `needs` must hold as well. If `needs` is None, the
    conditions must not hold at the same time.
    """

    what: str
    """The description of the error, which is reported for the first condition's field."""
    when: Sequence[Condition]
    needs: Condition | None = None

    def check(self, body: Any) -> None:
        """Raises InvalidArgument if a body breaks the rule."""
        applies = all(condition.holds(body) for condition in self.when)
        if applies and (self.needs is None or not self.needs.holds(body)):
            raise InvalidArgument.of(self.when[0].field, self.what)

    @property
    def broken(self) -> dict[str, Any]:
        """The schema of the objects that break the rule."""
        broken = [condition.schema for condition in self.when]
        return both(*broken) if self.needs is None else both(*broken, {"not": self.needs.schema})


def needs(field: str, other: str) -> Rule:
    """Returns the rule that a field may have a value other than null and 0 only if another field is true."""
    asks = Condition(field, lambda value: value not in (None, 0), {"not": {"enum": [None, 0]}})
    return Rule(f"may only be given together with {other}", (asks,), equals(other, True))


def excludes(field: str, other: str, what: str | None = None) -> Rule:
    """Returns the rule that two fields cannot both be given."""
    return Rule(what or f"cannot be combined with {other}", (given(field), given(other)))
