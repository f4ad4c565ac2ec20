"""Parses bytes into a typed body, up to the first error. Limits keep the cost low for any input.

There are two passes. The first pass finds the fields without decoding their values. The second pass checks the size of
each field and decodes it with its type. Before a list of prompts, ids or messages is decoded, the number of its
elements is estimated from its commas, brackets or quotation marks, because decoded elements take much more memory than
their JSON.

An unknown top-level field is refused, or reported to the caller and ignored. A number such as 2.0 is accepted as an
integer, as in JSON Schema. This module does not depend on connections.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, TypeVar, get_type_hints

import msgspec

from common.errors import InvalidArgument, Unimplemented
from gateway.api.body_fields import fields_of, required_of, unsupported_of
from gateway.api.chat_messages import MessageBody
from gateway.api.decoding import ANY, decoded
from gateway.api.embedding_request import EmbeddingBody, ScoreBody
from gateway.api.messages_history import TurnBody
from gateway.api.messages_request import CountTokensBody, MessagesBody
from gateway.api.openai_request import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from gateway.api.responses_input import InputItem, InputPart
from gateway.api.responses_request import ResponsesBody
from gateway.intake.limits import (
    BODY_SLACK_BYTES,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BATCH_PROMPTS,
    MAX_BODY_BYTES,
    MAX_CONTENT_PARTS,
    MAX_FIELD_BYTES,
    MAX_MESSAGES,
    MAX_TOOLS_BYTES,
    TOO_LONG,
    Checker,
    PromptLimits,
)
from gateway.intake.wanted import IdsPrompt, TextPrompt

M = TypeVar("M", bound=Body)
JSON_BYTES = 6
"""The largest number of bytes that JSON needs for one byte of text: an ASCII character may be written as \\u0041."""
ID_BYTES = 8
"""Number of bytes that JSON usually needs for a token id and its comma."""
NOTHING_BYTES = 64
"""The maximum size in bytes of an unsupported field's neutral value, which is accepted."""
MAX_QUOTES = 16 * (MAX_MESSAGES + MAX_CONTENT_PARTS)
"""The largest number of unescaped quotation marks in a list of messages. A part of content has 8, and a message has
about as many; the limit allows twice as many.
"""
_FIRST = re.compile(rb"\[\s*([^\s\]])")
"""Matches the first character of an array's first element."""
_AFTER_LIST = re.compile(rb"\s*(?:,\s*)?([\[\]])")
"""Matches what follows a list in a list of lists: the end, or the next list."""
_MIX = "must hold strings, or integers, or lists of integers, and not a mix"
_PROMPTS = ("prompt", "input")
_KINDS = "must be a string, a list of strings, token ids or a list of these, not empty"


def max_body_bytes(kind: type[Body], limits: PromptLimits) -> int:
    """Returns the size limit in bytes for a kind of body: the size of the largest prompts plus an allowance for the
    rest, but at most `MAX_BODY_BYTES`.
    """
    prompts = JSON_BYTES * limits.text_bytes
    if kind in (CompletionBody, EmbeddingBody, ScoreBody):
        prompts = max(prompts, MAX_BATCH_PROMPTS * max(limits.fitting_bytes, ID_BYTES * limits.max_model_len))
    elif kind is DetokenizeBody:
        prompts = ID_BYTES * limits.text_bytes
    return min(MAX_BODY_BYTES, BODY_SLACK_BYTES + prompts)


def parse_body(
    kind: type[M],
    raw: bytes | bytearray,
    limits: PromptLimits,
    on_unknown: Callable[[str], None] | None = None,
) -> M:
    """Parses a body. `on_unknown` is called with the name of each unknown top-level field; if it is None, such fields
    are refused.

    Raises InvalidArgument for an invalid or missing field, and Unimplemented for an unsupported field that is not null
    and does not have its neutral value.
    """
    values: dict[str, Any] = {}
    unsupported = unsupported_of(kind)
    for name, part in fields_of(kind, raw, on_unknown).items():
        if name in unsupported:
            _check_nothing(name, part, unsupported[name])
        elif (reader := _READERS.get((kind, name))) is not None:
            values[name] = reader(name, bytes(part), limits)
        else:
            values[name] = _small_field(kind, name, part)
    missing = [name for name in required_of(kind) if values.get(name) is None]
    if missing:
        raise InvalidArgument.of(missing[0], _KINDS if missing[0] in _PROMPTS else "must be given")
    body = kind(**values)
    for rule in kind.rules:
        rule.check(body)
    return body


def _check_nothing(name: str, part: msgspec.Raw, nothing: Any) -> None:
    small = memoryview(part).nbytes <= NOTHING_BYTES
    given = decoded(name, part, ANY) if small else ...
    if given is not None and (type(given) is not type(nothing) or given != nothing):  # 0 is not false
        raise Unimplemented.of(name)


def _small_field(kind: type[Body], name: str, part: msgspec.Raw) -> Any:
    num_bytes = memoryview(part).nbytes
    if num_bytes > MAX_FIELD_BYTES:
        raise InvalidArgument.of(name, f"must take at most {MAX_FIELD_BYTES} bytes as JSON, got {num_bytes}")
    return decoded(name, part, _decoders(kind)[name])


@cache
def _decoders(kind: type[Body]) -> Mapping[str, msgspec.json.Decoder[Any]]:
    hints = get_type_hints(kind, include_extras=True)
    small = [name for name in kind.__struct_fields__ if (kind, name) not in _READERS]
    return {name: msgspec.json.Decoder(hints[name]) for name in small}


# --- fields that may be large


def _text(name: str, raw: bytes, limits: PromptLimits) -> str | None:
    if len(raw) > JSON_BYTES * limits.text_bytes + 2:
        raise InvalidArgument.of(name, f"must be at most {limits.text_bytes} bytes", TOO_LONG)
    text: str | None = decoded(name, raw, _TEXT)
    return text


def _prompts(name: str, raw: bytes, limits: PromptLimits) -> list[TextPrompt | IdsPrompt]:
    """Returns the prompts in a string, a list of strings, a list of token ids, or a list of lists of token ids."""
    if raw.startswith(b'"'):
        return [TextPrompt(_text(name, raw, limits) or "")]
    first = _FIRST.match(raw)
    if first is None:
        raise InvalidArgument.of(name, _KINDS)
    if first[1] == b'"':
        return [TextPrompt(text) for text in _strings(name, raw)]
    if first[1] == b"[":
        return [IdsPrompt(ids) for ids in _id_lists(name, raw, first.end() - 1, limits)]
    return [IdsPrompt(_prompt_ids(name, name, raw, limits))]


def _texts(name: str, raw: bytes, limits: PromptLimits) -> str | list[str] | None:
    return _strings(name, raw) if raw.startswith(b"[") else _text(name, raw, limits)


def _strings(name: str, raw: bytes) -> list[str]:
    if _num_quotes(raw) > 4 * MAX_BATCH_PROMPTS:
        raise InvalidArgument.of(name, f"must hold at most {MAX_BATCH_PROMPTS} prompts")
    try:
        strings: list[str] = decoded(name, raw, _STRINGS)
    except InvalidArgument:
        raise InvalidArgument.of(name, _MIX) from None
    return _at_most_a_batch(name, strings)


def _id_lists(name: str, raw: bytes, begin: int, limits: PromptLimits) -> list[list[int]]:
    """Returns the lists in a list of lists of ids. The first list starts at `begin`. Strings are refused, so a list
    ends at the next closing bracket.
    """
    num_lists = raw.count(b"[") - 1
    if b'"' in raw:
        raise InvalidArgument.of(name, _MIX)
    if num_lists > MAX_BATCH_PROMPTS:
        raise InvalidArgument.of(name, f"must hold at most {MAX_BATCH_PROMPTS} prompts, got {num_lists}")
    lists: list[list[int]] = []
    while True:
        end = raw.index(b"]", begin) + 1
        own_name = name if num_lists == 1 else f"{name}[{len(lists)}]"
        lists.append(_prompt_ids(name, own_name, raw, limits, begin, end))
        after = _AFTER_LIST.match(raw, end)
        if after is None:
            raise InvalidArgument.of(name, _MIX)
        if after[1] == b"]":
            return lists
        begin = after.end() - 1


def _prompt_ids(
    name: str, own_name: str, raw: bytes, limits: PromptLimits, begin: int = 0, end: int | None = None
) -> list[int]:
    """Returns the ids in `raw[begin:end]`. `own_name` identifies the prompt in error messages."""
    count = raw.count(b",", begin, end) + 1
    if count > limits.max_model_len:
        checker = Checker(vocab_size=0, max_model_len=limits.max_model_len)
        checker.prompt_len(own_name, count)
        checker.finish()
    try:
        ids: list[int] = decoded(name, raw[begin:end], _IDS)
    except InvalidArgument:
        raise InvalidArgument.of(name, _MIX) from None
    return ids


def _tokens(name: str, raw: bytes, limits: PromptLimits) -> list[int]:
    """Returns the ids to detokenize. Refuses more ids than the longest text can have."""
    count = raw.count(b",") + 1
    if count > limits.text_bytes:
        raise InvalidArgument.of(name, f"must hold at most {limits.text_bytes} ids, got {count}")
    ids: list[int] = decoded(name, raw, _IDS)
    return ids


def _tools(name: str, raw: bytes, limits: PromptLimits) -> list[dict[str, Any]] | None:
    if len(raw) > MAX_TOOLS_BYTES:
        raise InvalidArgument.of(name, f"must take at most {MAX_TOOLS_BYTES} bytes as JSON, got {len(raw)}")
    tools: list[dict[str, Any]] | None = decoded(name, raw, _TOOLS)
    return tools


def _allowed_ids(name: str, raw: bytes, limits: PromptLimits) -> list[int] | None:
    count = raw.count(b",") + 1
    if count > MAX_ALLOWED_TOKEN_IDS:
        raise InvalidArgument.of(name, f"must hold at most {MAX_ALLOWED_TOKEN_IDS} ids, got {count}")
    ids: list[int] | None = decoded(name, raw, _ALLOWED)
    return ids


def _system(name: str, raw: bytes, limits: PromptLimits) -> str | list[InputPart] | None:
    if raw.startswith(b'"'):
        return _text(name, raw, limits)
    if _num_quotes(raw) > 16 * MAX_CONTENT_PARTS:
        raise InvalidArgument.of(name, f"must hold at most {MAX_CONTENT_PARTS} parts of content")
    parts: list[InputPart] | None = decoded(name, raw, _PARTS)
    return parts


def _input(name: str, raw: bytes, limits: PromptLimits) -> str | list[InputItem] | None:
    if raw.startswith(b'"'):
        return _text(name, raw, limits)
    items: list[InputItem] | None = _items(name, raw, limits)
    return items


def _with_parts(name: str, raw: bytes, limits: PromptLimits, *, decoder: msgspec.json.Decoder[Any], noun: str) -> Any:
    """Decodes a list whose entries have parts of content, if its size is within the limits."""
    if _num_quotes(raw) > MAX_QUOTES:
        what = f"must hold at most {MAX_MESSAGES} {noun} and {MAX_CONTENT_PARTS} parts of content"
        raise InvalidArgument.of(name, what)
    return decoded(name, raw, decoder)


def _at_most_a_batch(name: str, prompts: list[str]) -> list[str]:
    if len(prompts) > MAX_BATCH_PROMPTS:
        raise InvalidArgument.of(name, f"must hold at most {MAX_BATCH_PROMPTS} prompts, got {len(prompts)}")
    return prompts


def _num_quotes(raw: bytes) -> int:
    """Returns the number of quotation marks that do not follow a backslash. A string contributes two of them, or one if
    it ends in a backslash.
    """
    return raw.count(b'"') - raw.count(b'\\"')


_TEXT = msgspec.json.Decoder(str | None)
_STRINGS = msgspec.json.Decoder(list[str])
_IDS = msgspec.json.Decoder(list[int])
_ALLOWED = msgspec.json.Decoder(list[int] | None)
_PARTS = msgspec.json.Decoder(list[InputPart] | None)
_TOOLS = msgspec.json.Decoder(list[dict[str, Any]] | None)
_messages = partial(_with_parts, decoder=msgspec.json.Decoder(list[MessageBody] | None), noun="messages")
_turns = partial(_with_parts, decoder=msgspec.json.Decoder(list[TurnBody] | None), noun="messages")
_items = partial(_with_parts, decoder=msgspec.json.Decoder(list[InputItem] | None), noun="items")
_READERS: Mapping[tuple[type[Body], str], Callable[[str, bytes, PromptLimits], Any]] = {
    (CompletionBody, "prompt"): _prompts,
    (EmbeddingBody, "input"): _prompts,
    (ScoreBody, "text_1"): _texts,
    (ScoreBody, "text_2"): _texts,
    (CompletionBody, "allowed_token_ids"): _allowed_ids,
    (ChatBody, "allowed_token_ids"): _allowed_ids,
    (ChatBody, "messages"): _messages,
    (ChatBody, "tools"): _tools,
    (ResponsesBody, "input"): _input,
    (ResponsesBody, "instructions"): _text,
    (ResponsesBody, "tools"): _tools,
    (MessagesBody, "messages"): _turns,
    (MessagesBody, "system"): _system,
    (MessagesBody, "tools"): _tools,
    (CountTokensBody, "messages"): _turns,
    (CountTokensBody, "system"): _system,
    (CountTokensBody, "tools"): _tools,
    (TokenizeBody, "prompt"): _text,
    (TokenizeBody, "messages"): _messages,
    (TokenizeBody, "tools"): _tools,
    (DetokenizeBody, "tokens"): _tokens,
}
