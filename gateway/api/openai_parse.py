"""Parses bytes into a typed body. The limits bound the cost for any input. Stops at the first error.

There are two passes. The first finds the fields and creates no objects. The second decodes each field with its type,
after a check of its size. The number of elements of a prompt or a list of messages is estimated from its separators,
because element objects cost ten times the size of their bytes. Does not depend on connections.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar, get_type_hints

import msgspec

from common.errors import InvalidArgument, LooseleafError, Unimplemented
from gateway.api.openai_request import Body, ChatBody, CompletionBody, DetokenizeBody, MessageBody, TokenizeBody
from gateway.intake.limits import (
    BODY_SLACK_BYTES,
    MAX_BATCH_PROMPTS,
    MAX_BODY_BYTES,
    MAX_CONTENT_PARTS,
    MAX_FIELD_BYTES,
    MAX_MESSAGES,
    Checker,
    PromptLimits,
)
from gateway.intake.wanted import IdsPrompt, TextPrompt

M = TypeVar("M", bound=Body)
JSON_BYTES = 6
"""The most that JSON takes for a byte of a text: an ASCII character as \\u0041."""
ID_BYTES = 8
"""The bytes that JSON usually needs for a token id and its comma."""
NOTHING_BYTES = 64
"""The most bytes of an unsupported field's value that asks for nothing."""
MAX_QUOTES = 16 * (MAX_MESSAGES + MAX_CONTENT_PARTS)
"""The most quotation marks of a message that belong to JSON itself: a part has 8, a message about as many."""
_PATH = re.compile(r"(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<field>.*)`", re.DOTALL)
_FIRST = re.compile(rb"\[\s*([^\s\]])")
"""Matches the first character of an array's first element."""
_AFTER_LIST = re.compile(rb"\s*(?:,\s*)?([\[\]])")
"""Matches what follows a list in a list of lists: the end, or the next list."""
_MIX = "must hold strings, or integers, or lists of integers, and not a mix"
_KINDS = "must be a string, a list of strings, token ids or a list of these, not empty"


def max_body_bytes(kind: type[Body], limits: PromptLimits) -> int:
    """Returns the size limit for a kind of body: the size of the largest prompts, plus an allowance for the rest."""
    prompts = JSON_BYTES * limits.text_bytes
    if kind is CompletionBody:
        prompts = max(prompts, MAX_BATCH_PROMPTS * max(limits.fitting_bytes, ID_BYTES * limits.max_model_len))
    elif kind is DetokenizeBody:
        prompts = ID_BYTES * limits.text_bytes
    return min(MAX_BODY_BYTES, BODY_SLACK_BYTES + prompts)


def parse_body(kind: type[M], raw: bytes | bytearray, limits: PromptLimits) -> M:
    """Parses a body. Raises InvalidArgument for the first invalid field, and Unimplemented for an unsupported one."""
    values: dict[str, Any] = {}
    for name, part in _fields(kind, raw).items():
        if name in kind.unsupported:
            _check_nothing(name, part, kind.unsupported[name])
        elif (reader := _READERS.get((kind, name))) is not None:
            values[name] = reader(name, bytes(part), limits)
        else:
            values[name] = _small_field(kind, name, part)
    missing = [f.name for f in msgspec.structs.fields(kind) if f.required and values.get(f.name) is None]
    if missing:
        raise InvalidArgument.of(missing[0], _KINDS if missing == ["prompt"] else "must be given")
    return kind(**values)


def _fields(kind: type[Body], raw: bytes | bytearray) -> Mapping[str, msgspec.Raw]:
    """Returns the raw values of the given fields, without the ignored ones."""
    try:
        found = _outline(kind).decode(raw)
    except msgspec.ValidationError as error:
        unknown = _UNKNOWN.fullmatch(str(error)[:300])
        if unknown is None:
            raise InvalidArgument.of("body", "must be a JSON object") from None
        raise InvalidArgument.of(unknown["field"][:100], "is not a known field") from None
    except (ValueError, RecursionError):
        raise InvalidArgument.of("body", "must be valid JSON in UTF-8") from None
    parts = {name: getattr(found, name) for name in found.__struct_fields__ if name not in kind.ignored}
    return {name: part for name, part in parts.items() if part is not None}


@cache
def _outline(kind: type[Body]) -> msgspec.json.Decoder[Any]:
    """Finds the fields of a kind of body. Stops at an unknown field."""
    names = [*kind.__struct_fields__, *kind.ignored, *kind.unsupported]
    fields: list[Any] = [(name, msgspec.Raw, None) for name in names]
    return msgspec.json.Decoder(msgspec.defstruct(kind.__name__, fields, forbid_unknown_fields=True))


def _check_nothing(name: str, part: msgspec.Raw, nothing: Any) -> None:
    small = memoryview(part).nbytes <= NOTHING_BYTES
    if not small or _decoded(name, part, _ANY) not in (None, nothing):
        raise Unimplemented(f"{name} is not supported yet")


def _small_field(kind: type[Body], name: str, part: msgspec.Raw) -> Any:
    num_bytes = memoryview(part).nbytes
    if num_bytes > MAX_FIELD_BYTES:
        raise InvalidArgument.of(name, f"must take at most {MAX_FIELD_BYTES} bytes as JSON, got {num_bytes}")
    return _decoded(name, part, _decoders(kind)[name])


@cache
def _decoders(kind: type[Body]) -> Mapping[str, msgspec.json.Decoder[Any]]:
    hints = get_type_hints(kind, include_extras=True)
    small = [name for name in kind.__struct_fields__ if (kind, name) not in _READERS]
    return {name: msgspec.json.Decoder(hints[name]) for name in small}


def _decoded(name: str, part: bytes | msgspec.Raw, decoder: msgspec.json.Decoder[Any]) -> Any:
    try:
        return decoder.decode(part)
    except msgspec.ValidationError as error:
        raise _violation(name, str(error)[:1000]) from None
    except (ValueError, RecursionError):
        raise InvalidArgument.of(name, "must be valid JSON in UTF-8") from None


def _violation(name: str, message: str) -> LooseleafError:
    """Converts msgspec's message to one of ours: the path within the field becomes part of the field's name."""
    found = _PATH.fullmatch(message)
    assert found is not None  # the pattern takes anything
    name += (found["path"] or "").replace("[...]", "")
    if unknown := _UNKNOWN.fullmatch(found["what"]):
        return InvalidArgument.of(f"{name}.{unknown['field'][:100]}", "is not a known field")
    if missing := _MISSING.fullmatch(found["what"]):
        return InvalidArgument.of(f"{name}.{missing['field']}", "must be given")
    what = found["what"].replace("`", "")
    return InvalidArgument.of(name, f"is wrong: {what[:1].lower()}{what[1:200]}")


# --- fields that may be large


def _text(name: str, raw: bytes, limits: PromptLimits) -> str | None:
    if len(raw) > JSON_BYTES * limits.text_bytes + 2:
        raise InvalidArgument.of(name, f"must be at most {limits.text_bytes} bytes")
    text: str | None = _decoded(name, raw, _TEXT)
    return text


def _prompts(name: str, raw: bytes, limits: PromptLimits) -> list[TextPrompt | IdsPrompt]:
    """Returns the prompts of a completion, which are a string, strings, ids or lists of ids."""
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


def _strings(name: str, raw: bytes) -> list[str]:
    if _num_quotes(raw) > 4 * MAX_BATCH_PROMPTS:
        raise InvalidArgument.of(name, f"must hold at most {MAX_BATCH_PROMPTS} prompts")
    try:
        strings: list[str] = _decoded(name, raw, _STRINGS)
    except InvalidArgument:
        raise InvalidArgument.of(name, _MIX) from None
    return _at_most_a_batch(name, strings)


def _id_lists(name: str, raw: bytes, begin: int, limits: PromptLimits) -> list[list[int]]:
    """Splits lists of ids. The first list starts at `begin`. There are no strings between them, so a list ends at the
    next bracket.
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
    """Returns the ids in this part of `raw`. Errors name the prompt `own_name`."""
    count = raw.count(b",", begin, end) + 1
    if count > limits.max_model_len:
        checker = Checker(vocab_size=0, max_model_len=limits.max_model_len)
        checker.prompt_len(own_name, count)
        checker.finish()
    try:
        ids: list[int] = _decoded(name, raw[begin:end], _IDS)
    except InvalidArgument:
        raise InvalidArgument.of(name, _MIX) from None
    return ids


def _tokens(name: str, raw: bytes, limits: PromptLimits) -> list[int]:
    """Returns the ids to detokenize: at most as many as the longest text can have."""
    count = raw.count(b",") + 1
    if count > limits.text_bytes:
        raise InvalidArgument.of(name, f"must hold at most {limits.text_bytes} ids, got {count}")
    ids: list[int] = _decoded(name, raw, _IDS)
    return ids


def _messages(name: str, raw: bytes, limits: PromptLimits) -> list[MessageBody] | None:
    if _num_quotes(raw) > MAX_QUOTES:
        what = f"must hold at most {MAX_MESSAGES} messages and {MAX_CONTENT_PARTS} parts of content"
        raise InvalidArgument.of(name, what)
    messages: list[MessageBody] | None = _decoded(name, raw, _MESSAGES)
    return messages


def _at_most_a_batch(name: str, prompts: list[str]) -> list[str]:
    if len(prompts) > MAX_BATCH_PROMPTS:
        raise InvalidArgument.of(name, f"must hold at most {MAX_BATCH_PROMPTS} prompts, got {len(prompts)}")
    return prompts


def _num_quotes(raw: bytes) -> int:
    """Counts quotation marks: at least one for each string, at most two."""
    return raw.count(b'"') - raw.count(b'\\"')


_ANY = msgspec.json.Decoder()
_TEXT = msgspec.json.Decoder(str | None)
_STRINGS = msgspec.json.Decoder(list[str])
_IDS = msgspec.json.Decoder(list[int])
_MESSAGES = msgspec.json.Decoder(list[MessageBody] | None)
_READERS: Mapping[tuple[type[Body], str], Callable[[str, bytes, PromptLimits], Any]] = {
    (CompletionBody, "prompt"): _prompts,
    (ChatBody, "messages"): _messages,
    (TokenizeBody, "prompt"): _text,
    (TokenizeBody, "messages"): _messages,
    (DetokenizeBody, "tokens"): _tokens,
}
