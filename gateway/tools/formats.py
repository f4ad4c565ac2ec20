"""The families of output formats: which one a model's chat template asks for, and what that family needs from the
tokenizer.

A family is recognized by the markers of its format in the template. For a template of an unknown family or without
known markers, no format is found, and `--tool-call-parser` must choose one.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tokenizers import Tokenizer

from gateway.tools.call_parsers import CallParser, HermesParser, JsonParser, Llama3Parser, MistralParser
from gateway.tools.reasoning import CLOSE, OPEN
from gateway.tools.section_parsers import DeepSeekParser, GraniteParser, Phi4MiniParser

CallFormatName = Literal[
    "auto", "hermes", "llama3_json", "mistral", "json", "deepseek_v3", "deepseek_v31", "granite", "phi4_mini_json"
]
ReasoningFormatName = Literal["qwen3", "deepseek_r1"]
_FOREIGN = re.compile(
    r"<function|<arg_key>|<parameter|<\|tool_call|<tool_call\|>|<\|action_start|<\|channel\|>|<\|START_ACTION"
    r"|<\uff5ctool|<\uff5cDSML|tool_calls_section|minimax:tool_call|<\|python_start|\[func_name"
)
"""Markers of formats for which there is no parser here."""
_KEYS = re.compile(r"""["']?(?:parameters|arguments)["']?\s*:""")


def _long_id() -> str:
    return "call_" + secrets.token_hex(12)


def _short_id() -> str:
    """Returns an id in the form that Mistral's templates require."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a section of calls is written, for a grammar that enforces it. Each part is a marker or plain text."""

    opening: Sequence[str]
    """Between the format's marker and the first call."""
    before_name: Sequence[str]
    after_name: Sequence[str]
    after_arguments: Sequence[str]
    separator: Sequence[str]
    """Between two calls."""
    closing: Sequence[str]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family writes tool calls."""

    name: str
    parser: Callable[[frozenset[str], int | None], CallParser]
    """Called with the names of the tools and the maximum number of calls."""
    marks: Sequence[str] = ()
    """Parts of the output that may be special tokens. The parser needs to see them."""
    new_id: Callable[[], str] = _long_id
    marker: str = ""
    """The text that precedes every call, or every list of calls; empty if a call may be plain JSON."""
    compact: bool = False
    """Mistral's: whether calls are written as `name[ARGS]{...}` and not as a list."""
    spelling: Spelling | None = None
    """None for the formats that `enforce` itself knows."""


HERMES = CallFormat("hermes", HermesParser, (HermesParser.OPEN, HermesParser.CLOSE), marker=HermesParser.OPEN)
LLAMA3 = CallFormat("llama3_json", Llama3Parser, (Llama3Parser.TAG,))
_MISTRAL_MARKS = (MistralParser.MARKER, MistralParser.ARGS, MistralParser.CALL_ID)
MISTRAL = CallFormat("mistral", MistralParser, _MISTRAL_MARKS, _short_id, MistralParser.MARKER)
MISTRAL_COMPACT = CallFormat("mistral", MistralParser, _MISTRAL_MARKS, _short_id, MistralParser.MARKER, compact=True)
JSON = CallFormat("json", JsonParser)
_DEEPSEEK = DeepSeekParser
_DEEPSEEK_MARKS = (_DEEPSEEK.OPEN, _DEEPSEEK.CLOSE, _DEEPSEEK.CALL, _DEEPSEEK.CALL_END, _DEEPSEEK.SEP)
DEEPSEEK_V3 = CallFormat(
    "deepseek_v3",
    DeepSeekParser,
    _DEEPSEEK_MARKS,
    marker=_DEEPSEEK.OPEN,
    spelling=Spelling(
        opening=(),
        before_name=(_DEEPSEEK.CALL, _DEEPSEEK.KIND, _DEEPSEEK.SEP),
        after_name=(f"\n{_DEEPSEEK.CODE}\n",),
        after_arguments=(f"\n{_DEEPSEEK.CODE_END}", _DEEPSEEK.CALL_END),
        separator=("\n",),
        closing=(_DEEPSEEK.CLOSE,),
    ),
)
DEEPSEEK_V31 = CallFormat(
    "deepseek_v31",
    DeepSeekParser,
    _DEEPSEEK_MARKS,
    marker=_DEEPSEEK.OPEN,
    spelling=Spelling(
        opening=(),
        before_name=(_DEEPSEEK.CALL,),
        after_name=(_DEEPSEEK.SEP,),
        after_arguments=(_DEEPSEEK.CALL_END,),
        separator=(),
        closing=(_DEEPSEEK.CLOSE,),
    ),
)
_LIST = Spelling((), ('{"name": "',), ('", "arguments": ',), ("}",), (", ",), ("]",))
GRANITE = CallFormat(
    "granite",
    GraniteParser,
    (GraniteParser.MARK,),
    marker=GraniteParser.MARK,
    spelling=replace(_LIST, opening=("[",)),
)
PHI4_MINI = CallFormat("phi4_mini_json", Phi4MiniParser, marker=f"{Phi4MiniParser.MARK}[", spelling=_LIST)
_BY_NAME: Mapping[str, CallFormat] = {
    form.name: form for form in (HERMES, LLAMA3, JSON, DEEPSEEK_V3, DEEPSEEK_V31, GRANITE, PHI4_MINI)
}


def call_format(name: CallFormatName, template: str | None) -> CallFormat | None:
    """Returns the format with this name. For "auto", returns the one that the template asks for, if it is known."""
    template = template or ""
    if name == "mistral" or (name == "auto" and MistralParser.MARKER in template):
        return MISTRAL_COMPACT if MistralParser.ARGS in template else MISTRAL
    if name != "auto":
        return _BY_NAME[name]
    if DeepSeekParser.OPEN in template:
        return DEEPSEEK_V3 if DeepSeekParser.CODE in template else DEEPSEEK_V31
    if GraniteParser.MARK in template and "<|start_of_role|>" in template:
        return GRANITE
    if PHI4_MINI.marker in template:
        return PHI4_MINI
    if _FOREIGN.search(template):
        return None
    if HermesParser.OPEN in template:
        return HERMES
    if "<|start_header_id|>" in template and (Llama3Parser.TAG in template or _KEYS.search(template)):
        return LLAMA3
    return JSON if _KEYS.search(template) else None


@dataclass(frozen=True, slots=True)
class OutputFormats:
    """How the served model writes tool calls and reasoning. None means unknown, or not to be split off."""

    calls: CallFormat | None = None
    reasoning: ReasoningFormatName | None = None

    @property
    def reasoning_marks(self) -> Sequence[str]:
        return () if self.reasoning is None else (OPEN, CLOSE)


def special_ids(tokenizer: Tokenizer, marks: Sequence[str]) -> dict[str, int]:
    """Returns those of `marks` that are special tokens, with their ids. Special tokens are usually not part of the
    text.
    """
    added = tokenizer.get_added_tokens_decoder()
    return {token.content: token_id for token_id, token in added.items() if token.special and token.content in marks}


class CallIds:
    """A source of ids for the calls of one answer. All ids are distinct."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._given: set[str] = set()

    def next(self) -> str:
        while (made := self._new_id()) in self._given:
            pass
        self._given.add(made)
        return made
