"""Parsing of bytes into typed bodies: accepted bodies, the errors of invalid ones, and the low cost of hostile ones."""

from __future__ import annotations

import json
import time
import tracemalloc
from typing import Any

import pytest

from bench.served.hostile_bodies import CHAT, COMPLETIONS, DETOKENIZE, HOSTILE_BODIES, TOKENIZE, HostileBody
from common.errors import InvalidArgument, LooseleafError, Unimplemented
from gateway.api.messages_request import CountTokensBody, MessagesBody
from gateway.api.openai_parse import max_body_bytes, parse_body
from gateway.api.openai_request import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from gateway.api.responses_request import ResponsesBody
from gateway.intake.limits import MAX_BATCH_PROMPTS, MAX_BODY_BYTES, MAX_FIELD_BYTES, PromptLimits
from gateway.intake.wanted import IdsPrompt, TextPrompt

SMALL = PromptLimits(text_bytes=64 << 10, fitting_bytes=20 << 10, max_model_len=1024)
LARGE = PromptLimits(text_bytes=4 << 20, fitting_bytes=4 << 20, max_model_len=131_072)
KINDS: dict[str, type[Body]] = {
    COMPLETIONS: CompletionBody, CHAT: ChatBody, TOKENIZE: TokenizeBody, DETOKENIZE: DetokenizeBody
}  # fmt: skip


def parse(kind: type[Body], content: Any, limits: PromptLimits = SMALL) -> Any:
    return parse_body(kind, content if isinstance(content, bytes) else json.dumps(content).encode(), limits)


@pytest.mark.parametrize(
    ("prompt", "taken"),
    [
        ("the mill", [TextPrompt("the mill")]),
        (["a", 'b"', "\\", ""], [TextPrompt("a"), TextPrompt('b"'), TextPrompt("\\"), TextPrompt("")]),
        ([1, 2], [IdsPrompt([1, 2])]),
        ([[1, 2]], [IdsPrompt([1, 2])]),
        ([[1], [], [2, 3]], [IdsPrompt([1]), IdsPrompt([]), IdsPrompt([2, 3])]),
        (['"' * 50] * MAX_BATCH_PROMPTS, [TextPrompt('"' * 50)] * MAX_BATCH_PROMPTS),
        (["\\"] * MAX_BATCH_PROMPTS, [TextPrompt("\\")] * MAX_BATCH_PROMPTS),
        ([list(range(1024))] * MAX_BATCH_PROMPTS, [IdsPrompt(list(range(1024)))] * MAX_BATCH_PROMPTS),
    ],
)
@pytest.mark.parametrize("indent", [None, 2])
def test_prompts_of_every_kind(prompt: Any, taken: Any, indent: int | None) -> None:
    raw = json.dumps({"prompt": prompt}, indent=indent).encode()
    assert parse(CompletionBody, raw).prompt == taken


def test_fields_arrive_and_ignored_ones_do_not_matter() -> None:
    body = parse(
        CompletionBody,
        {"prompt": "x", "temperature": 1, "stop": ["a"], "logit_bias": {"5": 1}, "n": None, "user": [1], "tools": []},
    )
    assert (body.temperature, body.stop, body.logit_bias, body.n) == (1.0, ["a"], {"5": 1.0}, None)
    chat = parse(ChatBody, {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]})
    assert chat.all_wanted()[0].prompt.messages == [{"role": "user", "content": "hi"}]
    whole = parse(ChatBody, {"messages": [{"role": "user", "content": "x", "refusal": None, "tool_calls": []}] * 4096})
    assert len(whole.messages) == 4096


def test_parts_of_a_prompt_and_allowed_ids_have_their_own_limits() -> None:
    text, ids = "You are helpful. " * 5000, list(range(118_000, 128_000))
    turns = [{"role": "user", "content": "x"}]
    parts = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]
    for kind in (MessagesBody, CountTokensBody):
        more = {"max_tokens": 5} if kind is MessagesBody else {}
        for system in (text, parts, None):
            body = parse(kind, {"messages": turns, "system": system, **more}, LARGE)
            assert len(body.prompt().messages[0]["content"]) == (len(text) if system else 1)
    assert parse(ResponsesBody, {"instructions": text, "input": "x"}, LARGE).instructions == text
    assert parse(CompletionBody, {"prompt": "x", "allowed_token_ids": ids}).allowed_token_ids == ids
    assert parse(ChatBody, {"messages": turns, "allowed_token_ids": None}).allowed_token_ids is None


WRONG: list[tuple[type[Body], Any, str]] = [
    (CompletionBody, b"[1]", "body must be a JSON object"),
    (CompletionBody, b"7", "body must be a JSON object"),
    (CompletionBody, b"{", "body must be valid JSON in UTF-8"),
    (CompletionBody, b'{"prompt":"a"} x', "body must be valid JSON in UTF-8"),
    (CompletionBody, '{"prompt":"a"}'.encode("utf-16"), "body must be valid JSON in UTF-8"),
    (CompletionBody, b'{"prompt":"\xff"}', "prompt must be valid JSON in UTF-8"),
    (CompletionBody, b'{"prompt":"a","user":' + b"[" * 100_000, "body must not be nested so deeply"),
    (CompletionBody, b'{"prompt":"\\ud800"}', "body must be valid JSON in UTF-8, without lone surrogates"),
    (CompletionBody, {"nonsense": 1}, "nonsense is not a known field"),
    (CompletionBody, {}, "prompt must be a string, a list"),
    (CompletionBody, {"prompt": None}, "prompt must be a string, a list"),
    (CompletionBody, {"prompt": []}, "prompt must be a string, a list"),
    (CompletionBody, {"prompt": {"a": 1}}, "prompt must be a string, a list"),
    (CompletionBody, {"prompt": ["a", 1]}, "prompt must hold strings, or integers"),
    (CompletionBody, {"prompt": [1, "a"]}, "prompt must hold strings, or integers"),
    (CompletionBody, {"prompt": [[1], "a"]}, "prompt must hold strings, or integers"),
    (CompletionBody, {"prompt": [[1], 1, [1]]}, "prompt must hold strings, or integers"),
    (CompletionBody, {"prompt": [[1], 1]}, "prompt must hold strings, or integers"),
    (CompletionBody, {"prompt": [[[1]]]}, "prompt must hold strings, or integers"),
    (CompletionBody, {"prompt": [[1], {}]}, "prompt must hold strings, or integers"),
    (CompletionBody, {"prompt": [True]}, "prompt must hold strings, or integers"),
    (CompletionBody, {"prompt": [1.5]}, "prompt must hold strings, or integers"),
    (CompletionBody, {"prompt": ["a"] * 65}, "prompt must hold at most 64 prompts, got 65"),
    (CompletionBody, {"prompt": [[1]] * 65}, "prompt must hold at most 64 prompts, got 65"),
    (CompletionBody, {"prompt": ["a"] * 1000}, "prompt must hold at most 64 prompts"),
    (CompletionBody, {"prompt": [1] * 1025}, "prompt is 1025 tokens long; the limit is 1023"),
    (CompletionBody, {"prompt": [[1], [1] * 1025]}, "prompt[1] is 1025 tokens long; the limit is 1023"),
    (CompletionBody, {"prompt": "a" * (6 * SMALL.text_bytes + 1)}, "prompt must be at most 65536 bytes"),
    (CompletionBody, {"prompt": "x", "stop": ["a", 1]}, "stop[1] is invalid: expected str, got int"),
    (CompletionBody, {"prompt": "x", "stop": ["a" * 9] * 9000}, f"stop must take at most {MAX_FIELD_BYTES} bytes"),
    (CompletionBody, {"prompt": "x", "max_tokens": "5"}, "max_tokens is invalid: expected int"),
    (CompletionBody, {"prompt": "x", "stream_options": {"oops": 1}}, "stream_options.oops is not a known field"),
    (ChatBody, {}, "messages must be given"),
    (ChatBody, {"messages": None}, "messages must be given"),
    (ChatBody, {"messages": 1}, "messages is invalid: expected array"),
    (ChatBody, {"messages": [{"content": "a"}]}, "messages[0].role must be given"),
    (ChatBody, {"messages": [{"role": "a", "content": "b", "x": 1}]}, "messages[0].x is not a known field"),
    (ChatBody, {"messages": [{"role": "a", "content": [{"text": "b"}]}]}, "messages[0].content[0].type must be"),
    (ChatBody, {"messages": [{"role": "a", "content": "b"}] * 99_999}, "messages must hold at most 4096 messages"),
    (MessagesBody, {"system": "a" * (6 * SMALL.text_bytes + 1)}, "system must be at most 65536 bytes"),
    (MessagesBody, {"system": [{"type": "text", "text": ""}] * 99_999}, "system must hold at most 16384 parts"),
    (MessagesBody, {"system": 1}, "system is invalid: expected array"),
    (MessagesBody, {"system": [{"text": ""}]}, "system[0].type must be given"),
    (ResponsesBody, {"instructions": "a" * (6 * SMALL.text_bytes + 1)}, "instructions must be at most 65536 bytes"),
    (ResponsesBody, {"instructions": [1]}, "instructions is invalid: expected str"),
    (CompletionBody, {"allowed_token_ids": [1] * 10_001}, "allowed_token_ids must hold at most 10000 ids, got 10001"),
    (ChatBody, {"allowed_token_ids": ["a"]}, "allowed_token_ids[0] is invalid: expected int"),
    (TokenizeBody, {"prompt": 1}, "prompt is invalid: expected str"),
    (DetokenizeBody, {"tokens": [1] * 65_537}, "tokens must hold at most 65536 ids, got 65537"),
    (DetokenizeBody, {"tokens": ["a"]}, "tokens[0] is invalid: expected int"),
    (DetokenizeBody, {}, "tokens must be given"),
]


@pytest.mark.parametrize(("kind", "content", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_what_is_wrong_is_named_with_its_limit(kind: type[Body], content: Any, message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse(kind, content)
    assert caught.value.message.startswith(message), caught.value.message
    assert len(caught.value.violations) == 1 and caught.value.violations[0].field == message.split(" ")[0]


@pytest.mark.parametrize("value", [[1], {"type": "x"}, "y" * 1000, [[]] * 9999])
def test_what_is_not_supported_is_refused_by_name_whatever_its_size(value: Any) -> None:
    with pytest.raises(Unimplemented, match="tools is not supported yet"):
        parse(CompletionBody, {"prompt": "x", "tools": value})


def test_a_body_may_be_as_large_as_its_prompts() -> None:
    assert max_body_bytes(CompletionBody, SMALL) > MAX_BATCH_PROMPTS * SMALL.fitting_bytes
    assert max_body_bytes(CompletionBody, LARGE) == MAX_BODY_BYTES
    longest = json.dumps({"messages": [{"role": "user", "content": "\x01" * SMALL.text_bytes}]}).encode()
    assert len(longest) < max_body_bytes(ChatBody, SMALL) < max_body_bytes(CompletionBody, SMALL)
    assert parse(ChatBody, longest).messages[0].content == "\x01" * SMALL.text_bytes


@pytest.mark.parametrize("limits", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("body", HOSTILE_BODIES, ids=lambda body: body.name)
def test_hostile_bodies_cost_little_time_and_memory(body: HostileBody, limits: PromptLimits) -> None:
    """If the parser made an object for each element, it would take many times the memory, and seconds."""
    kind = KINDS[body.path]
    raw = body.make(max_body_bytes(kind, limits))
    began = time.thread_time()
    _try(kind, raw, limits)
    assert time.thread_time() - began < 1.0
    tracemalloc.start()
    _try(kind, raw, limits)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * len(raw) + (16 << 20)


def _try(kind: type[Body], raw: bytes, limits: PromptLimits) -> None:
    try:
        parse_body(kind, raw, limits)
    except LooseleafError as error:
        assert len(error.message) < 1000 and len(error.violations) <= 16
