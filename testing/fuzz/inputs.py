"""Generates messages with arbitrary values, bytes that are almost messages, and HTTP requests that are almost valid.
The same seed gives the same inputs.
"""

from __future__ import annotations

import contextlib
import json
import random
import string
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from smg_grpc_proto import vllm_engine_pb2

from protos.v1 import decode_pb2, inference_pb2, prefill_pb2, types_pb2

_DEPTH = 5
_INTS = (0, 1, 2, 3, 16, 127, 128, 256, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1, -1, -(2**31), -(2**63))
_FLOATS = (0.0, 1.0, 0.5, -1.0, 2.0, 1e-300, 1e38, -1e38, float("inf"), float("-inf"), float("nan"))
_TEXTS = ("", "a", "default", "Hello there", "\0", "é" * 40, "🙂", "x" * 5000, "0" * 16, "../../etc/passwd")
_BOUNDS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1), FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1), FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}  # fmt: skip
_KEYS = (
    "model", "prompt", "messages", "max_tokens", "n", "temperature", "top_p", "top_k", "stop", "stream", "seed",
    "logprobs", "top_logprobs", "echo", "best_of", "logit_bias", "user", "stream_options", "tools", "response_format",
    "frequency_penalty", "presence_penalty", "min_tokens", "ignore_eos", "use_beam_search", "cache_salt", "input",
    "instructions", "max_output_tokens", "previous_response_id", "store", "text", "include", "metadata", "tool_choice",
    "skip_special_tokens", "truncate_prompt_tokens", "return_token_ids", "bad_words", "system", "stop_sequences",
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "allowed_token_ids",
    "parallel_tool_calls", "encoding_format", "dimensions", "text_1", "text_2", "output_config", "reasoning",
    "type", "role", "content", "name", "arguments", "call_id", "output", "parameters", "input_schema", "strict",
    "tool_use_id", "function", "schema",
)  # fmt: skip
_PATHS = (
    "/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics", "/tokenize", "/detokenize", "/",
    "/v1/models/x", "/v1/embeddings", "/%00", "/v1/completions/../models", "/" + "a" * 9000, "/v1/responses",
    "/v1/messages", "/v1/messages/count_tokens", "/score", "/v1/score",
    "/version", "/ping", "/load", "/openapi.json", "/docs", "/docs.js", "/v1/explain", "/v1/explain/x", "/v1/workers",
    "/v1/blocks", "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
)  # fmt: skip


_STOPPING = types_pb2.StoppingParams(max_tokens=3)
_PROMPT = [5, 6, 7, 8, 9]
_TOKENIZED = vllm_engine_pb2.TokenizedInput(input_ids=_PROMPT)
_SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
_FUNCTION = {"name": "f", "description": "d", "parameters": _SCHEMA, "strict": True}
_TOOL = {"type": "function", "function": _FUNCTION}
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"city": "Rome"}'}}
_ASK = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
_CHAT = {"messages": [_ASK], "max_tokens": 3, "seed": 1}
_LONG_CHAT = {**_CHAT, "max_tokens": 40, "temperature": 1.5, "tools": [{"type": "function", "function": {"name": "f"}}]}
_RESPONSE: dict[str, Any] = {"input": "Hi", "max_output_tokens": 3}
_ITEM = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
_ITEMS = [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}, _ITEM,
          {"type": "function_call_output", "call_id": "c", "output": "sun"}]  # fmt: skip
_BLOCKS = [{"type": "text", "text": "a"}, {"type": "tool_use", "id": "c", "name": "f", "input": {"city": "Rome"}}]
_RESULTS = [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "sun"}]}]
_TURNS = [_ASK, {"role": "assistant", "content": _BLOCKS}, {"role": "user", "content": _RESULTS}]
_CLAUDE = {"messages": _TURNS, "max_tokens": 3, "tools": [{"name": "f", "input_schema": _SCHEMA, "strict": True}]}
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"prompt": "Hi", "max_tokens": 3, "bad_words": ["a", "the mill"]},
        {"prompt": [5, 6], "max_tokens": 3, "allowed_token_ids": [7, 8, 9], "n": 2},
        {"prompt": "Hi", "max_tokens": 3, "structured_outputs": {"json": _SCHEMA}},
        {"prompt": "Hi", "max_tokens": 3, "guided_regex": "[a-c]{2}"},
    ],
    "/v1/chat/completions": [
        {**_CHAT, "tools": [_TOOL], "tool_choice": "auto"},
        {**_LONG_CHAT, "stream": True},
        {**_LONG_CHAT, "tools": [_TOOL], "tool_choice": "required"},
        {**_CHAT, "tools": [_TOOL], "tool_choice": "required", "parallel_tool_calls": False, "stream": True},
        {**_CHAT, "tools": [_TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        {**_CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}}},
        {**_CHAT, "tools": [_TOOL], "messages": [
            _ASK, {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "sun"}]},
    ],
    "/v1/responses": [
        {**_RESPONSE, "tools": [{"type": "function", **_FUNCTION}], "tool_choice": "required", "stream": True},
        {**_RESPONSE, "tools": [{"type": "function", **_FUNCTION}], "parallel_tool_calls": False, "input": _ITEMS},
        {**_RESPONSE, "text": {"format": {"type": "json_schema", "name": "x", "schema": _SCHEMA}}},
        {**_RESPONSE, "reasoning": {"effort": "low"}, "instructions": "brief", "input": _ITEMS},
    ],
    "/v1/messages": [
        {**_CLAUDE, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "stream": True},
        {**_CLAUDE, "tool_choice": {"type": "tool", "name": "f"}, "system": [{"type": "text", "text": "brief"}]},
        {**_CHAT, "output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}}},
    ],
    "/v1/messages/count_tokens": [_CLAUDE],
    "/v1/embeddings": [
        {"input": ["a", "b"], "encoding_format": "base64", "dimensions": 8},
        {"input": [[5, 6], [7]], "truncate_prompt_tokens": 1},
    ],
    "/score": [{"text_1": "a", "text_2": ["b", "c"]}, {"text_1": ["a", "b"], "text_2": ["b", "c"]}],
    "/tokenize": [{"messages": [_ASK], "tools": [_TOOL], "add_generation_prompt": False}],
}  # fmt: skip
"""Bodies that the gateway accepts, by path."""
_ALL_BODIES = [body for bodies in BODIES.values() for body in bodies]
RIGHT: dict[str, Message] = {
    "vllm.grpc.engine.EmbedRequest": vllm_engine_pb2.EmbedRequest(tokenized=_TOKENIZED),
    "vllm.grpc.engine.GenerateRequest": vllm_engine_pb2.GenerateRequest(
        tokenized=_TOKENIZED, sampling_params=vllm_engine_pb2.SamplingParams(max_tokens=3), stream=True
    ),
    "looseleaf.v1.EmbedRequest": inference_pb2.EmbedRequest(token_ids=inference_pb2.TokenIds(ids=_PROMPT)),
    "looseleaf.v1.GenerateRequest": inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=_PROMPT), stopping=_STOPPING, sampling=types_pb2.SamplingParams()
    ),
    "looseleaf.v1.TokenizeRequest": inference_pb2.TokenizeRequest(text="Hello there"),
    "looseleaf.v1.PrefillRequest": prefill_pb2.PrefillRequest(
        request_id="fuzz", prompt_token_ids=_PROMPT, branches=[types_pb2.Branch()], stopping=_STOPPING,
        sampling=types_pb2.SamplingParams(),
    ),
    "looseleaf.v1.SessionRequest": decode_pb2.SessionRequest(
        submit=decode_pb2.Submit(
            handle=1, request_id="fuzz", prompt_token_ids=_PROMPT, stopping=_STOPPING, timeout_ms=500,
            ticket=types_pb2.Ticket(arena_id="0" * 16, epoch=7, branches=[types_pb2.BranchTables(num_tokens=5)]),
            branches=[types_pb2.Branch(output_token_ids=[5])], sampling=types_pb2.SamplingParams(),
        )
    ),
}  # fmt: skip
"""Messages that a service accepts, or that are valid except for the ticket, by the full name of their type."""


def message(draw: random.Random, kind: type[Message]) -> Message:
    """Returns a message of a type. Some of its fields have arbitrary values, or it is a copy of the message in RIGHT
    with up to two changes.
    """
    right = RIGHT.get(kind.DESCRIPTOR.full_name)
    if right is not None and draw.random() < 0.6:
        return near(draw, right)
    made = kind()
    _fill(draw, made, kind.DESCRIPTOR, 0)
    return made


def near(draw: random.Random, right: Message) -> Message:
    """Returns a copy of a valid message with up to two changes, so that it may pass the first checks."""
    made = type(right)()
    made.CopyFrom(right)
    for _ in range(draw.choice((0, 1, 1, 2))):
        _disturb(draw, made)
    return made


def _disturb(draw: random.Random, made: Any) -> None:
    field = draw.choice(made.DESCRIPTOR.fields)
    inner = field.message_type
    if inner is not None and inner.fields and not field.is_repeated and draw.random() < 0.8:
        return _disturb(draw, getattr(made, field.name))
    if draw.random() < 0.5:
        made.ClearField(field.name)
    _set(draw, made, field, 0)


def _fill(draw: random.Random, made: Any, descriptor: Any, depth: int) -> None:
    density = draw.choice((0.2, 0.6, 0.95))
    for field in descriptor.fields:
        if draw.random() > density or (field.message_type is not None and depth >= _DEPTH):
            continue
        _set(draw, made, field, depth)


def _set(draw: random.Random, made: Any, field: FieldDescriptor, depth: int) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        container = getattr(made, field.name)
        values = field.message_type.fields_by_name
        with contextlib.suppress(ValueError, TypeError):
            key, inner = _value(draw, values["key"]), values["value"].message_type
            if inner is None:
                container[key] = _value(draw, values["value"])
            else:
                _fill(draw, container[key], inner, depth + 1)
        return
    many = field.is_repeated
    for _ in range(draw.choice((0, 1, 1, 2, 3, 8, 40)) if many else 1):
        if field.message_type is not None:
            inner = getattr(made, field.name).add() if many else getattr(made, field.name)
            inner.SetInParent()
            _fill(draw, inner, field.message_type, depth + 1)
        elif many:
            getattr(made, field.name).append(_value(draw, field))
        else:
            setattr(made, field.name, _value(draw, field))


def _value(draw: random.Random, field: Any) -> Any:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return draw.randbytes(draw.choice((0, 1, 8, 16, 32, 500)))
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return draw.choice(_TEXTS)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return draw.random() < 0.5
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return draw.choice((*field.enum_type.values_by_number, 99))
    if field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return draw.choice((*_FLOATS, draw.random()))
    low, high = _BOUNDS[field.cpp_type]
    number = draw.randrange(8, 200) if draw.random() < 0.6 else draw.choice(_INTS)
    return min(max(number, low), high)


def almost(draw: random.Random, whole: bytes) -> bytes:
    """Returns the bytes of a message with changed, removed or added parts, or random bytes."""
    match draw.randrange(5):
        case 0:
            return draw.randbytes(draw.choice((1, 3, 20, 300)))
        case 1:
            return whole[: draw.randrange(len(whole) + 1)]
        case 2:
            return whole + whole[draw.randrange(len(whole) + 1) :] + draw.randbytes(2)
        case _:
            changed = bytearray(whole or b"\x0a")
            for _ in range(draw.choice((1, 2, 8))):
                changed[draw.randrange(len(changed))] = draw.randrange(256)
            return bytes(changed)


def json_value(draw: random.Random, depth: int = 0) -> Any:
    """Returns an arbitrary JSON value, sometimes an invalid one (NaN, infinity)."""
    kind = draw.randrange(9 if depth < 4 else 6)
    match kind:
        case 0:
            return draw.choice((None, True, False))
        case 1:
            return draw.choice((*_INTS, draw.randrange(100)))
        case 2:
            return draw.choice((*_FLOATS, draw.random()))
        case 3 | 4:
            return draw.choice(_TEXTS)
        case 5:
            return "".join(draw.choices(string.printable, k=draw.randrange(30)))
        case 6 | 7:
            return [json_value(draw, depth + 1) for _ in range(draw.choice((0, 1, 2, 6)))]
        case _:
            return {draw.choice((*_KEYS, *_TEXTS)): json_value(draw, depth + 1) for _ in range(draw.choice((0, 1, 3)))}


def disturbed(draw: random.Random, right: Any) -> Any:
    """Returns a copy of a JSON value with up to four places changed, at any depth."""
    made = json.loads(json.dumps(right))
    for _ in range(draw.choice((0, 1, 1, 2, 4))):
        at, key = made, None
        while True:
            keys: list[Any] = list(at) if isinstance(at, dict) else list(range(len(at)))
            key = draw.choice(keys) if keys and draw.random() < 0.9 else None
            if key is None or not isinstance(at[key], dict | list) or draw.random() < 0.3:
                break
            at = at[key]
        if isinstance(at, dict):
            at[draw.choice(_KEYS) if key is None else key] = json_value(draw, 2)
        elif key is None or draw.random() < 0.3:
            at.append(json_value(draw, 2))
        else:
            at[key] = json_value(draw, 2)
    return made


def body(draw: random.Random, path: str) -> bytes:
    """Returns a request body. If BODIES contains the path, about half of the results are variants of the bodies listed
    there.
    """
    if draw.random() < 0.15:
        return draw.choice((b"", b"{", b"[" * 3000, b"null", b'"' + b"\\u0000" * 50 + b'"', draw.randbytes(200)))
    if draw.random() < 0.6:
        text = json.dumps(disturbed(draw, draw.choice(BODIES.get(path) or _ALL_BODIES))).encode()
        return almost(draw, text) if draw.random() < 0.1 else text
    right: dict[str, Any] = {
        "model": "tiny", "max_tokens": draw.randrange(1, 4), "prompt": draw.choice((_TEXTS[3], [5, 6, 7], ["a", "b"])),
        "messages": [{"role": "user", "content": "Hi"}], "max_output_tokens": draw.randrange(1, 4),
        "input": draw.choice(("Hi", [{"role": "user", "content": draw.choice(("Hi", [{"type": "input_text"}]))}])),
    }  # fmt: skip
    for _ in range(draw.choice((0, 1, 1, 2, 5))):
        right[draw.choice(_KEYS)] = json_value(draw)
    text = json.dumps(right).encode()
    return almost(draw, text) if draw.random() < 0.2 else text


def http(draw: random.Random) -> bytes:
    """Returns the bytes of an HTTP request. Its parts may be invalid, and about a tenth of the requests are changed by
    `almost`.
    """
    path = draw.choice((*_PATHS[:2], *BODIES) * 3 + _PATHS)
    content = body(draw, path)
    method = draw.choice(("POST",) * 6 + ("GET", "PUT", "DELETE", "OPTIONS", "HEAD", "BREW", "\xff"))
    length = draw.choice((len(content),) * 8 + (0, 1, -1, 10**12, len(content) + 3))
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close", f"Content-Length: {length}"]
    if draw.random() < 0.3:
        lines.append(draw.choice((
            "Content-Type: text/plain", "Transfer-Encoding: chunked", "Authorization: x", "Expect: 100-continue",
            "X: " + "y" * 9000, "no colon", "Content-Encoding: gzip", "Upgrade: websocket", "Range: bytes=0-",
            "X-Request-Id: " + "\xff" * 300, "Origin: https://x\r\nAccess-Control-Request-Method: POST", "X-API-Key: x",
        )))  # fmt: skip
    whole = "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + content
    return almost(draw, whole) if draw.random() < 0.1 else whole
