"""Any JSON in the fields of a chat gives either a prompt and a plan, or an error that names a field."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest

from common.errors import InvalidArgument, LooseleafError
from gateway.api.chat_fields import tool_choice
from gateway.api.chat_plan import ChatPlanner
from gateway.api.openai_parse import parse_body
from gateway.api.openai_request import ChatBody
from gateway.intake.limits import PromptLimits
from gateway.intake.tokenizing import TokenizerPool
from gateway.intake.wanted import ChatPrompt
from testing.gateway.parts import make_assets
from testing.gateway.tool_formats import TEMPLATES

LIMITS = PromptLimits(1 << 16, 1 << 16, 2048)
CALL = {"id": "abc123def", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "maximum": 9},
        "b": {"type": ["string", "null"]},
        "c": {"type": "array", "items": {"$ref": "#/$defs/d"}, "maxItems": 2},
    },
    "required": ["a"],
    "$defs": {"d": {"enum": ["x", 1]}},
}
GOOD: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "u"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "r", "tool_call_id": "abc123def"},
        {"role": "assistant", "content": "a", "reasoning_content": "t"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "reasoning_effort": "low",
    "chat_template_kwargs": {"enable_thinking": False, "x": [1]},
    "continue_final_message": False,
    "add_generation_prompt": True,
}
VALUES = (
    None, True, False, 0, -1, 2**70, 1.5, "", "a", "tool", "assistant", "function", "required", "\ud800", "{}", "[1]",
    "{" * 99, "x" * 3000, [], {}, [[]], [None], {"function": {"name": "f"}}, {"type": "text"}, {"": ""},
    {"role": "tool"}, {"\ud800": 1}, "{{ messages }}", "<tool_call>",
)  # fmt: skip


def disturbed(rng: random.Random, value: Any, depth: int = 0) -> Any:
    """Returns the value with a few parts replaced, removed or repeated."""
    if rng.random() < 0.02 * (depth > 0):
        return rng.choice(VALUES)
    if isinstance(value, dict):
        made = {key: disturbed(rng, item, depth + 1) for key, item in value.items() if rng.random() > 0.01}
        if rng.random() < 0.02:
            made[rng.choice(["x", "name", "content", "tool_calls", "tools", "type"])] = rng.choice(VALUES)
        return made
    if isinstance(value, list):
        made_list = [disturbed(rng, item, depth + 1) for item in value if rng.random() > 0.02]
        return made_list * rng.choice([1, 1, 1, 1, 2])
    return value


@pytest.mark.parametrize("family", TEMPLATES)
async def test_any_body_is_taken_or_refused_by_a_field(family: str) -> None:
    form, template = TEMPLATES[family]
    assets = make_assets(chat_template=template, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    planner, pool = ChatPlanner(assets, reasoning="qwen3"), TokenizerPool(assets, 1)
    rng, seen = random.Random(11), Counter[str]()
    fragments = (*form.marks, "<think>", "</think>", '{"name": "f", ', "f", "a", ":", "(", "[", "]", '"', "}", "1")
    for _ in range(300):
        raw = json.dumps(disturbed(rng, GOOD)).encode()
        try:
            body = parse_body(ChatBody, raw, LIMITS)
            [wanted] = body.all_wanted()
            plan = planner.plan(wanted, tool_choice(body))
            assert isinstance(wanted.prompt, ChatPrompt)
            text, ids = await pool.encode_chat(wanted.prompt, add_special_tokens=False)
            assert ids or not text
            reader = plan.reader(text)
            reader.feed("".join(rng.choices(fragments, k=12)))
            reader.finish()
            if wanted.structured_after is not None:
                assert wanted.structured_after(text).source
            seen["taken"] += 1
        except LooseleafError as error:
            assert isinstance(error, InvalidArgument) and error.violations, raw
            seen["refused"] += 1
    pool.close()
    assert min(seen["taken"], seen["refused"]) > 50, seen
