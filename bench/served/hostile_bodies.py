"""HTTP request bodies that may cost the gateway more than their size suggests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"


@dataclass(frozen=True, slots=True)
class HostileBody:
    name: str
    path: str
    make: Callable[[int], bytes]
    """Returns a body of at most the given number of bytes and, except for `_id_batch`, not much less."""


def _filled(before: str, unit: str, after: str) -> Callable[[int], bytes]:
    """Returns a function that generates a body with as many repetitions of `unit` as fit into a given size."""

    def make(size: int) -> bytes:
        head, middle, tail = before.encode(), unit.encode(), after.encode()
        return head + middle * ((size - len(head) - len(tail)) // len(middle)) + tail

    return make


def _nested(before: str, opening: str, closing: str, after: str) -> Callable[[int], bytes]:
    def make(size: int) -> bytes:
        depth = (size - len(before) - len(after)) // (len(opening) + len(closing))
        return (before + opening * depth + closing * depth + after).encode()

    return make


def _numbered(before: str, unit: Callable[[int], str], after: str) -> Callable[[int], bytes]:
    """Returns a function that generates a body with units that differ, so that no unit overwrites another."""

    def make(size: int) -> bytes:
        parts, left, number = [before], size - len(before) - len(after), 0
        while (left := left - len(unit(number))) >= 0:
            parts.append(unit(number))
            number += 1
        return ("".join(parts) + after).encode()

    return make


def _text_batch(size: int) -> bytes:
    """Returns a body with as many long texts as are accepted, followed by an empty text, which is rejected."""
    text = "mill " * (size // 64 // 5 - 4)
    return json.dumps({"prompt": [text] * 63 + [""]}).encode()


def _id_batch(size: int) -> bytes:
    """Returns a body with lists of ids, each of which ends with an id that is rejected."""
    return json.dumps({"prompt": [[*range(10, 1000), 2**31]] * 64}).encode()[:size]


_PROMPT = '{"prompt":"a","max_tokens":1,'
_BODIES: Mapping[str, Mapping[str, Callable[[int], bytes]]] = {
    COMPLETIONS: {
        "stop: numbers": _filled(_PROMPT + '"stop":[', "1,", "1]}"),
        "stop: strings": _filled(_PROMPT + '"stop":[', '"a",', '"a"]}'),
        "stop: lists": _filled(_PROMPT + '"stop":[', "[],", "[]]}"),
        "stop: one string": _filled(_PROMPT + '"stop":"', "a", '"}'),
        "stop_token_ids": _filled(_PROMPT + '"stop_token_ids":[', "1,", "1]}"),
        "logit_bias: entries": _numbered(_PROMPT + '"logit_bias":{', lambda i: f'"{i}":1,', '"x":1}}'),
        "logit_bias: one key": _filled(_PROMPT + '"logit_bias":{"', "1", '":1}}'),
        "unknown keys": _numbered("{", lambda i: f'"{i}":1,', '"x":1}'),
        "one unknown key": _filled('{"', "x", '":1}'),
        "a known key again": _filled("{", '"n":1,', '"n":1}'),
        "prompt again": _filled("{", '"prompt":[1],', '"prompt":[]}'),
        "prompt: ids": _filled('{"prompt":[', "1,", "1]}"),
        "prompt: lists of one id": _filled('{"prompt":[', "[1],", "[1]]}"),
        "prompt: one list of ids": _filled('{"prompt":[[', "1,", "1]]}"),
        "prompt: one list, then ids": _filled('{"prompt":[[1],', "1,", "1]}"),
        "prompt: empty strings": _filled('{"prompt":[', '"",', '""]}'),
        "prompt: backslashes": _filled('{"prompt":[', '"\\\\",', '"\\\\"]}'),
        "prompt: strings, then numbers": _filled('{"prompt":["a",', "1,", "1]}"),
        "prompt: text": _filled('{"prompt":"', "a", '"}'),
        "prompt: escaped newlines": _filled('{"prompt":"', "\\n", '"}'),
        "prompt: escaped letters": _filled('{"prompt":"', "\\u00e9", '"}'),
        "prompt: escaped pairs": _filled('{"prompt":"', "\\ud83d\\ude00", '"}'),
        "prompt: UTF-8": _filled('{"prompt":"', "\u20ac", '"}'),
        "prompt: lists in lists": _nested('{"prompt":', "[", "]", "}"),
        "prompt: objects in objects": _nested('{"prompt":', '{"a":', "1}", "}"),
        "prompt: true": _filled('{"prompt":[', "true,", "true]}"),
        "prompt: null": _filled('{"prompt":[', "null,", "null]}"),
        "prompt: fractions": _filled('{"prompt":[', "1e-300,", "1.5]}"),
        "prompt: out of range": _filled('{"prompt":[', "1e999,", "1]}"),
        "prompt: one number": _filled('{"prompt":[', "1", "]}"),
        "prompt: objects": _filled('{"prompt":[', "{},", "{}]}"),
        "prompt: a batch of long ids": _id_batch,
        "prompt: a batch of long texts": _text_batch,
        "seed: one number": _filled(_PROMPT + '"seed":', "1", "}"),
        "metadata": _numbered(_PROMPT + '"max_tokens":-1,"metadata":{', lambda i: f'"{i}":[],', '"x":1}}'),
        "user: lists": _filled(_PROMPT + '"max_tokens":-1,"user":[', "[],", "[]]}"),
        "tools": _filled(_PROMPT + '"tools":[', "{},", "{}]}"),
        "response_format": _nested(_PROMPT + '"response_format":', '{"type":', "}", "}"),
        "white space": _filled('{"prompt":', " ", "7}"),
        "no end": _filled('{"prompt":[', '"a",', ""),
        "no UTF-8": lambda size: b'{"prompt":"' + b"\xff" * (size - 13) + b'"}',
    },
    CHAT: {
        "messages: empty": _filled('{"messages":[', "{},", "{}]}"),
        "messages: short": _filled('{"messages":[', '{"role":"a","content":""},', '{"role":"a","content":""}]}'),
        "messages: wrong at the end": _filled('{"messages":[', '{"role":"a","content":""},', "1]}"),
        "messages: parts": _filled(
            '{"messages":[{"role":"a","content":[', '{"type":"text","text":""},', '{"type":"text","text":""}]}]}'
        ),
        "messages: nulls": _filled(
            '{"messages":[{"role":"a","content":"","annotations":[', "null,", "null]}]}"
        ),
        "messages: a key again": _filled('{"messages":[{', '"role":"a",', '"content":7}]}'),
        "messages: one text": _filled('{"messages":[{"role":"user","content":"', "a", '"}]}'),
        "messages: escaped text": _filled('{"messages":[{"role":"user","content":"', "\\n", '"}]}'),
    },
    TOKENIZE: {
        "text to tokenize": _filled('{"prompt":"', "mill ", '"}'),
        "messages to tokenize": _filled('{"messages":[', '{"role":"a","content":"b"},', '{"role":"a","content":"b"}]}'),
    },
    DETOKENIZE: {
        "ids to detokenize": _filled('{"tokens":[', "1,", "1]}"),
        "long ids to detokenize": _filled('{"tokens":[', "99999999999999999999,", "1]}"),
    },
}  # fmt: skip
HOSTILE_BODIES = [
    HostileBody(name, path, make) for path, bodies in _BODIES.items() for name, make in bodies.items()
]  # fmt: skip
