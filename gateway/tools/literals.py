"""Reads literals in the notation of Python or of Gemma, one character at a time, and passes them on as JSON."""

from __future__ import annotations

import json
import math
import re
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gateway.tools.call_object import END, NotACall, Scan, Take, expect, read_among, skip_space

_CONSTANTS: Mapping[str, str] = {
    "True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null",
}  # fmt: skip
_HEX = frozenset(string.hexdigits)
_ESCAPES: Mapping[str, str] = {
    "n": "\\n", "t": "\\t", "r": "\\r", "b": "\\b", "f": "\\f", "v": "\\u000b", "a": "\\u0007", "0": "\\u0000",
    "\\": "\\\\", '"': '\\"', "'": "'", "/": "/", "\n": "",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Notation:
    """The notation of a literal: its brackets, and the readers of its keys and scalars."""

    closers: Mapping[str, str]
    """The closing bracket of each opening bracket."""
    key: Callable[[str, Take], Scan]
    """Reads a key and its colon."""
    scalar: Callable[[str, Take], Scan]


def literal(ch: str, take: Take, notation: Notation) -> Scan:
    """Reads a literal and passes it on as JSON. At the first part that is not in this notation, raises NotACall. In
    Python's notation, which includes JSON, tuples become lists. Literals that JSON cannot express, such as sets and
    bytes, raise NotACall.
    """
    closers: list[str] = []
    while True:
        if ch in notation.closers:
            closers.append(notation.closers[ch])
            take("{" if ch == "{" else "[")
            ch = yield from skip_space((yield))
            if ch != closers[-1]:
                if closers[-1] == "}":
                    ch = yield from notation.key(ch, take)
                continue
        else:
            ch = yield from notation.scalar(ch, take)
        ch = yield from _closed(ch, closers, take)
        if not closers:
            return ch
        take(", ")
        if closers[-1] == "}":
            ch = yield from notation.key(ch, take)


def _closed(ch: str, closers: list[str], take: Take) -> Scan:
    """Reads the closing brackets and the comma after an item. Returns the first character of the next item or, at the
    end, the character after the literal.
    """
    while closers:
        ch = yield from skip_space(ch)
        if ch == ",":
            ch = yield from skip_space((yield))
            if ch != closers[-1]:
                return ch
        if ch != closers[-1]:
            raise NotACall
        take("}" if closers.pop() == "}" else "]")
        ch = yield
    return ch


def _key(ch: str, take: Take) -> Scan:
    """Reads a key of a dict, which must be a string, and its colon."""
    if ch not in ("'", '"'):
        raise NotACall
    ch = yield from _string(ch, take)
    ch = yield from skip_space(ch)
    ch = yield from expect(ch, ":")
    take(": ")
    return (yield from skip_space(ch))


def _scalar(ch: str, take: Take) -> Scan:
    """Reads a string, a number or a constant."""
    if ch in ("'", '"'):
        return (yield from _string(ch, take))
    letters: list[str] = []
    while ch != END and (ch.isalnum() or ch in "_+-."):
        letters.append(ch)
        ch = yield
    if ch == END:  # the end of the word may be missing
        raise NotACall
    word = "".join(letters)
    take(_CONSTANTS[word] if word in _CONSTANTS else _number(word))
    return ch


def _number(word: str) -> str:
    if re.fullmatch(r"-?(0|[1-9]\d{0,999})", word, re.ASCII):
        return word
    try:
        value = float(word)
    except ValueError:
        raise NotACall from None
    if not math.isfinite(value):
        raise NotACall
    return json.dumps(value)


def _string(quote: str, take: Take) -> Scan:
    """Reads a string after its opening quotation mark `quote`."""
    take('"')
    ch = yield
    while ch != quote:
        if ch == END:
            raise NotACall
        if ch == "\\":
            ch = yield from _escape((yield), take)
            continue
        take(json.dumps(ch, ensure_ascii=False)[1:-1])
        ch = yield
    take('"')
    return (yield)


def _escape(ch: str, take: Take) -> Scan:
    """Reads an escape after its backslash. An unknown escape keeps its backslash."""
    size = {"x": 2, "u": 4, "U": 8}.get(ch)
    if ch == END:
        raise NotACall
    if size is None:
        take(_ESCAPES.get(ch, "\\\\" + ch))
        return (yield)
    digits = ""
    while len(digits) < size:
        if (ch := (yield)) not in _HEX:
            raise NotACall
        digits += ch
    if int(digits, 16) > 0x10FFFF:
        raise NotACall
    take(f"\\u{int(digits, 16):04x}" if size < 8 else json.dumps(chr(int(digits, 16)))[1:-1])
    return (yield)


PYTHON = Notation({"[": "]", "(": ")", "{": "}"}, _key, _scalar)


def quoted_notation(quote: str) -> Notation:
    """Returns the notation of Gemma's calls: keys without quotation marks, and texts between two marks `quote`, without
    escapes. JSON's strings are also read. A word that is neither a number nor a constant is a text.
    """

    def text(ch: str, take: Take) -> Scan:
        ch = yield from expect(ch, quote)
        take('"')
        while ch != END:
            read, ch = yield from read_among(ch, (quote,))
            if read == quote:
                take('"')
                return ch
            take(json.dumps(read or ch, ensure_ascii=False)[1:-1])
            ch = ch if read else (yield)
        raise NotACall

    def key(ch: str, take: Take) -> Scan:
        if ch in ("<", '"'):
            ch = yield from text(ch, take) if ch == "<" else _string(ch, take)
            ch = yield from skip_space(ch)
        else:
            letters: list[str] = []
            while ch not in (END, ":", ",", "{", "}", "\n"):
                letters.append(ch)
                ch = yield
            take(json.dumps("".join(letters).strip(), ensure_ascii=False))
        ch = yield from expect(ch, ":")
        take(": ")
        return (yield from skip_space(ch))

    def scalar(ch: str, take: Take) -> Scan:
        if ch == "<":
            return (yield from text(ch, take))
        if ch == '"':
            return (yield from _string(ch, take))
        letters: list[str] = []
        while ch not in (END, ",", "}", "]"):
            letters.append(ch)
            ch = yield
        if ch == END:  # the end of the word may be missing
            raise NotACall
        take(_bare("".join(letters).strip()))
        return ch

    return Notation({"[": "]", "{": "}"}, key, scalar)


def _bare(word: str) -> str:
    """Returns the JSON of a word without quotation marks."""
    if word.lower() in ("null", "none", "nil"):
        return "null"
    try:
        return word if word in ("true", "false") else _number(word)
    except NotACall:
        return json.dumps(word, ensure_ascii=False)
