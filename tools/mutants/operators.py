"""Finds the mutants of a Python file. Each mutant is a small change that a programmer could make by mistake."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.RShift: ast.LShift, ast.LShift: ast.RShift,
}  # fmt: skip
_QUIET = ("_LOG", "logger", "logging", "log")
"""Names of loggers. Calls to them are not mutated, because few tests depend on log lines."""
_FORMAL = ("strict", "slots", "frozen", "daemon", "compare", "init")
"""Keyword arguments that are not mutated, because tests can hardly detect such a change."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change to one place in a file."""

    path: str
    line: int
    kind: str
    start: int
    """The offset in bytes from the start of the file."""
    end: int
    old: str
    new: str

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.end :]


def mutants_of(path: str, source: str) -> list[Mutant]:
    """Returns all mutants of a file that parse, in the order of the file."""
    lines = source.encode().splitlines(keepends=True)
    starts = [sum(map(len, lines[:number])) for number in range(len(lines) + 1)]
    found: list[Mutant] = []
    for node, kind, changed in _changes(ast.parse(source)):
        if node.lineno is None or node.end_lineno is None or node.end_col_offset is None:
            continue
        start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        old, new = source.encode()[start:end].decode(), _text(node, changed)
        mutant = Mutant(path, node.lineno, kind, start, end, old, new)
        if new != old and _parses(mutant.apply(source.encode())):
            found.append(mutant)
    return sorted(set(found), key=lambda mutant: (mutant.start, mutant.end, mutant.new))


def _text(node: ast.AST, changed: ast.AST | str) -> str:
    if isinstance(changed, str):
        return changed
    text = ast.unparse(changed)
    return f"({text})" if isinstance(node, ast.expr) and not isinstance(node, ast.Constant | ast.Call) else text


def _parses(source: bytes) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def _changes(tree: ast.Module) -> Iterator[tuple[ast.Any, str, ast.AST | str]]:  # type: ignore[name-defined]
    for node in _code(tree):
        match node:
            case ast.Compare(ops=[op]) if type(op) in _COMPARE:
                yield node, "comparison", _with(node, ops=[_COMPARE[type(op)]()])
            case ast.BoolOp():
                yield node, "and / or", _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
            case ast.UnaryOp(op=ast.Not()):
                yield node, "not", node.operand
            case ast.BinOp() if type(node.op) in _ARITHMETIC:
                yield node, "arithmetic", _with(node, op=_ARITHMETIC[type(node.op)]())
            case ast.Constant(value=bool()):
                yield node, "constant", _with(node, value=not node.value)
            case ast.Constant(value=int() | float()):
                yield node, "constant", _with(node, value=node.value + 1)
            case ast.If(test=ast.Name("TYPE_CHECKING")):
                pass
            case ast.If() | ast.While() | ast.IfExp():
                yield node.test, "condition", ast.UnaryOp(ast.Not(), node.test)
            case ast.Call(func=ast.Name("max" | "min")):
                pass
            case ast.Call(args=[first, second, *rest], keywords=[]):
                yield node, "swapped arguments", _with(node, args=[second, first, *rest])
        yield from _removals(node)


def _removals(node: ast.AST) -> Iterator[tuple[ast.Any, str, str]]:  # type: ignore[name-defined]
    match node:
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Delete() | ast.Raise() | ast.Continue() | ast.Break():
            yield node, "removed statement", "pass"
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and not value.value):
            yield node, "returns None", "return None"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield node, "removed statement", "pass"
        case ast.FunctionDef(decorator_list=[ast.Name() as only]) if only.id not in ("property", "classmethod"):
            yield only, "removed decorator", "(lambda f: f)"


def _code(tree: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes that may be mutated. Leaves out log lines, asserts, imports, parameter lists, annotations, and
    the keywords in `_FORMAL`.
    """
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Call) and _is_quiet(child.value.func):
            continue
        if isinstance(child, ast.Assert | ast.Import | ast.ImportFrom | ast.arguments):
            continue
        if isinstance(child, ast.keyword) and child.arg in _FORMAL:
            continue
        if isinstance(child, ast.AnnAssign):
            child = ast.Module([child.value] if child.value else [], [])  # type: ignore[list-item]
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            child = copy.copy(child)
            child.returns = None
        yield child
        yield from _code(child)


def _is_quiet(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id in _QUIET


def _with(node: ast.AST, **fields: object) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed
