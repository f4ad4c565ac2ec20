"""Builds grammars for tool calls, for `tool_choice` "required" or a named function, and for `strict` functions with
"auto".

The grammar uses the call format of the model's family, so the model uses the format that it was trained on, and the
family's parser can read the result. The grammar is written in llguidance's variant of Lark, and refers to special
tokens by their ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.types import StructuredOutput
from gateway.tools.argument_rules import PythonicRules, TagRules
from gateway.tools.call_format import CallFormat
from gateway.tools.call_parsers import HermesParser, MistralParser
from gateway.tools.gemma_rules import GemmaRules
from gateway.tools.names import ReasoningFormatName
from gateway.tools.reasoning import CLOSE, OPEN, begins_inside
from gateway.tools.schemas import object_schema

_MAX_MARKER_BYTES = 20
"""The size of the longest marker that free text can exclude, unless the marker is a special token. A marker of 28 bytes
exceeds the limits of llguidance's lexer.
"""
_ANY = r"/(.|\n)*/"
"""A pattern that matches any text."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any]
    """A JSON schema of the arguments."""
    strict: bool = False
    """Whether the arguments must match the schema even if `tool_choice` is "auto"."""


def calls_grammar(
    form: CallFormat,
    functions: Sequence[Function],
    special: Mapping[str, int],
    *,
    many: bool,
    thinking: str = "",
    free: bool = False,
) -> StructuredOutput:
    """Returns a grammar for calls of `functions`: one call, or at least one if `many` is set and the format allows
    several. If `free` is set, the grammar allows text with or without calls, and only the arguments of strict functions
    must match their schema.

    `special` contains the ids of markers that are special tokens; `thinking` is the result of `thinking_before`. Raises
    ValueError for free text if calls in this format cannot be distinguished from it, and for a schema that cannot be
    enforced in this format.
    """
    lark = _Lark(form, functions, special)
    return StructuredOutput("lark", "\n".join(lark.lines(many, thinking, free=free)) + "\n")


def thinking_before(reasoning: ReasoningFormatName | None, prompt: str, continued: str | None = None) -> str:
    """Returns a name for the text that may precede the calls: "" (no text), "optional" (reasoning with its tags), or
    "open" (the rest of reasoning that began in the prompt). `continued` is the message that the output continues, or
    None.
    """
    if reasoning is None:
        return ""
    if begins_inside(reasoning, prompt, continued):
        return "open"
    return "" if continued is not None or prompt[-64:].rstrip().endswith(CLOSE) else "optional"


class _Lark:
    """A writer of one grammar."""

    def __init__(self, form: CallFormat, functions: Sequence[Function], special: Mapping[str, int]) -> None:
        self._form = form
        self._functions = functions
        self._special = special
        self._rules: TagRules | PythonicRules | GemmaRules | None = None
        """The rules for arguments that are not a JSON object, or None for JSON objects."""
        if form.tags is not None:
            self._rules = TagRules(form.tags, form.line_break, self._mark)
        elif form.is_pythonic:
            self._rules = PythonicRules()
        elif form.quote:
            self._rules = GemmaRules(form.quote, self._mark)

    def lines(self, many: bool, thinking: str, *, free: bool) -> list[str]:
        before = {"": "", "optional": "thinking? ", "open": "thought "}[thinking] or self._thought()
        many = many and not self._form.covers_answer
        tools = " | ".join(f"tool_{index}" for index in range(len(self._functions)))
        lines = ["%llguidance {}", f"start: {before}calls", f"tool: {tools}"]
        lines += self._calls_in_text(many) if free else self._calls(many)
        lines += self._rules.shared if self._rules is not None else ()
        for index, function in enumerate(self._functions):
            lines += self._tool(function, index, function.parameters if function.strict or not free else {})
        return lines + (self._thinking() if thinking else [])

    def _calls(self, many: bool) -> list[str]:
        if not self._form.marker and self._form.spelling is not None:
            return [f"calls: {self._after_marker(many)}"]
        if not self._form.marker:  # Llama 3 makes one call at a time
            as_list = self._form.name == "json" and many
            return ['calls: "[" tool (", " tool)* "]"' if as_list else "calls: tool"]
        between = self._parts(self._form.spelling.separator) if self._form.spelling is not None else '"\\n"'
        repeated = f" ({'' if self._form.compact else between} call)*" if many and not self._is_list else ""
        return [f"calls: call{repeated}", f"call: {self._mark(self._form.marker)} {self._after_marker(many)}"]

    def _calls_in_text(self, many: bool) -> list[str]:
        """Returns rules for text with calls. A call follows each marker, so the text itself cannot contain the marker.
        Raises ValueError if no marker distinguishes calls from text.
        """
        marker = self._form.marker
        if (
            self._form.covers_answer
            or not marker
            or not (marker in self._special or len(marker.encode()) <= _MAX_MARKER_BYTES)
        ):
            raise ValueError(f"a call of the format {self._form.name} cannot be distinguished from text")
        opened = f"TEXT {self._mark(marker)}" if marker in self._special else "opened"
        return [
            f"calls: call{'*' if many else '?'} TEXT",
            f"call: {opened} {self._after_marker(many)}",
            f"TEXT: {_ANY} & ~/(.|\\n)*{re.escape(marker)}(.|\\n)*/",
            *([] if marker in self._special else [f'opened[suffix="{marker}"]: {_ANY}']),
        ]

    @property
    def _is_list(self) -> bool:
        """Whether one marker precedes a list of all calls."""
        if self._form.spelling is not None:
            return not self._form.spelling.is_repeated
        return self._form.name == "mistral" and not self._form.compact

    def _after_marker(self, many: bool) -> str:
        spelling = self._form.spelling
        if spelling is not None:
            more = f" ({self._parts(spelling.separator)} tool)*" if many and self._is_list else ""
            return f"{self._parts(spelling.opening)} tool{more} {self._parts(spelling.closing)}"
        if self._form.name == "hermes":
            return f'"\\n" tool "\\n" {self._mark(HermesParser.CLOSE)}'
        repeated = ' (", " tool)*' if many else ""
        return f'" "? "[" tool{repeated} "]"' if self._is_list else "tool"

    def _tool(self, function: Function, index: int, parameters: Mapping[str, Any]) -> list[str]:
        """Returns the rules for a call of one function with arguments of this schema."""
        if self._rules is not None:
            return self._rules.tool(function.name, index, parameters)
        return [f"tool_{index}: {self._call(function, index)}", f"arguments_{index}: %json {object_schema(parameters)}"]

    def _call(self, function: Function, index: int) -> str:
        spelling = self._form.spelling
        if spelling is not None:
            before, after = self._parts(spelling.before_name), self._parts(spelling.after_name)
            end = self._parts(spelling.after_arguments)
            return f"{before} {json.dumps(json.dumps(function.name)[1:-1])} {after} arguments_{index} {end}"
        if self._form.compact:
            return f"{json.dumps(function.name)} {self._mark(MistralParser.ARGS)} arguments_{index}"
        key = "parameters" if self._form.name in ("llama3_json", "llama4_json") else "arguments"
        head = f'{{"name": {json.dumps(function.name)}, "{key}": '
        return f'{json.dumps(head)} arguments_{index} "}}"'

    def _thought(self) -> str:
        """Returns the grammar of the optional reasoning that precedes calls in the call format. Raises ValueError if
        one of the reasoning's markers is not a special token of the tokenizer.
        """
        marks = [part for part in self._form.thought if isinstance(part, str) and part.startswith("<")]
        if missing := [mark for mark in marks if mark not in self._special]:
            raise ValueError(f"{missing[0]} is not a special token of the tokenizer")
        return f"({self._parts(self._form.thought)})? " if marks else ""

    def _thinking(self) -> list[str]:
        gap = '("\\n" | "\\n\\n")?'
        if CLOSE in self._special:
            thought = [f"thought: {_ANY} {self._mark(CLOSE)} {gap}"]
        else:
            thought = [f"thought: text {gap}", f'text[suffix="{CLOSE}"]: {_ANY}']
        return [f"thinking: {self._mark(OPEN)} thought", *thought]

    def _parts(self, parts: Sequence[str | re.Pattern[str]]) -> str:
        return " ".join(self._mark(part) if isinstance(part, str) else f"/{part.pattern}/" for part in parts)

    def _mark(self, mark: str) -> str:
        return f"<[{self._special[mark]}]>" if mark in self._special else json.dumps(mark)
