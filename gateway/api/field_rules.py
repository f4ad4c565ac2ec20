"""Rules between the fields of a body: a body's class lists them, the parser checks them, and /openapi.json has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import InvalidArgument

NOT_NULL: Mapping[str, Any] = {"not": {"type": "null"}}


def has(field: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of the objects in which a field is present, with a value of this schema."""
    return {"type": "object", "required": [field], "properties": {field: dict(value)}}


def both(*schemas: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of the objects that match all of these schemas."""
    return {"allOf": list(schemas)}


@dataclass(frozen=True, slots=True)
class Condition:
    """A statement about the value of a field, as code and as a JSON schema of the value. Both say the same."""

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
    """If all conditions of `when` hold, `needs` must hold too. Without `needs`, they must not all hold."""

    what: str
    """The error about the first condition's field."""
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
    """Returns the rule that a field may only be given if another one is true."""
    return Rule(f"may only be given together with {other}", (given(field),), equals(other, True))


def excludes(field: str, other: str, what: str | None = None) -> Rule:
    """Returns the rule that only one of two fields may be given."""
    return Rule(what or f"and {other} exclude each other", (given(field), given(other)))
