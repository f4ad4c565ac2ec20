"""Calls torch operators with arguments by name, so that one caller works with builds whose arguments differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class SchemaCall:
    """An operator that is called with arguments by the names in its schema. Arguments in `optional` that the operator
    lacks are dropped from calls. An argument that is in neither `required` nor `optional` gets the schema's default.
    Without a default, it gets None if its type is optional, and otherwise its value in `neutral`, which switches a
    feature off.
    """

    def __init__(self, op: Any, required: frozenset[str], optional: frozenset[str], neutral: Mapping[str, Any]) -> None:
        """Reads the operator's schema. Raises ValueError if the schema lacks an argument in `required`, or demands an
        argument without a known value.
        """
        overload = op.default if isinstance(op, torch._ops.OpOverloadPacket) else op
        arguments = overload._schema.arguments
        names = {argument.name for argument in arguments}
        if missing := sorted(required - names):
            raise ValueError(f"its operator {overload._schema.name} has no argument {missing[0]}")
        self._op = overload
        self._known = names & (required | optional)
        self._rest: dict[str, Any] = {}
        for argument in arguments:
            if argument.name in self._known or argument.has_default_value():
                continue
            if isinstance(argument.type, torch.OptionalType):
                self._rest[argument.name] = None
            elif argument.name in neutral:
                self._rest[argument.name] = neutral[argument.name]
            else:
                raise ValueError(f"its operator {overload._schema.name} requires the unknown argument {argument.name}")

    def __call__(self, **given: Any) -> Any:
        return self._op(**{name: value for name, value in given.items() if name in self._known}, **self._rest)
