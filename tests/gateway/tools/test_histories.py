"""Histories with tools, rendered like `apply_chat_template` in transformers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import InvalidArgument
from engine.tiny import write_tokenizer
from gateway.api.chat_fields import chat_prompt
from gateway.api.chat_plan import ChatPlanner
from gateway.api.openai_parse import parse_body
from gateway.api.openai_request import ChatBody
from gateway.intake.chat_template import ChatTemplate
from gateway.intake.limits import PromptLimits
from testing.gateway.parts import make_assets
from testing.gateway.tool_templates import HERMES, LLAMA3, MISTRAL

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
TEMPLATES = {"hermes": HERMES, "llama3": LLAMA3, "mistral": MISTRAL}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Says the weather: <sun>, 'rain' & é.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}


def call(name: str, arguments: dict[str, Any], call_id: str = "abc123def") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


USER: dict[str, Any] = {"role": "user", "content": "How is Paris?"}
CALLED: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call("get_weather", {"city": "Päris"})]}
ANSWERED: dict[str, Any] = {"role": "tool", "content": '{"sun": true}', "tool_call_id": "abc123def"}
HISTORIES: dict[str, list[dict[str, Any]]] = {
    "one question": [USER],
    "a system prompt": [{"role": "system", "content": " Be brief. "}, USER],
    "a call": [USER, CALLED, ANSWERED],
    "a call and its answer": [USER, CALLED, ANSWERED, {"role": "assistant", "content": "Sunny."}, USER],
    "content with a call": [USER, {**CALLED, "content": "I will look."}, ANSWERED],
    "null fields": [{**USER, "name": None}, {**CALLED, "reasoning_content": None}, ANSWERED],
    "reasoning": [USER, {"role": "assistant", "content": "Hm.", "reasoning_content": "\nLet me think.\n"}, USER],
}
TWO_CALLS = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [call("get_time", {}), call("get_weather", {"a": [1, None]})]},
    ANSWERED,
    ANSWERED,
]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    directory: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return AutoTokenizer.from_pretrained(directory)


def as_sent(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages as a client sends them, with arguments as text."""
    sent = copy.deepcopy(messages)
    for message in sent:
        for item in message.get("tool_calls") or ():
            item["function"]["arguments"] = json.dumps(item["function"]["arguments"], ensure_ascii=False)
    return sent


def ours(template: str, messages: list[dict[str, Any]], **fields: Any) -> str:
    raw = json.dumps({"messages": as_sent(messages), **fields}).encode()
    body = parse_body(ChatBody, raw, PromptLimits(1 << 16, 1 << 16, 2048))
    prompt = chat_prompt(body, body.messages, body.reasoning_effort)
    return ChatTemplate(template, SPECIAL).render(
        prompt.messages,
        tools=prompt.tools,
        add_generation_prompt=prompt.add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
        variables=prompt.variables,
    )


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("tools", [None, [WEATHER], [WEATHER, TIME]], ids=["none", "one", "two"])
def test_a_history_is_rendered_as_transformers_does(
    theirs: Any, family: str, history: str, tools: list[dict[str, Any]] | None
) -> None:
    template, messages = TEMPLATES[family], HISTORIES[history]
    expected = theirs.apply_chat_template(
        messages, tools=tools, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    assert ours(template, messages, tools=tools) == expected
    assert "Paris" in expected and (tools is None or "Says the weather" in expected)


@pytest.mark.parametrize("family", ["hermes", "mistral"])
def test_several_calls_are_rendered_as_transformers_does(theirs: Any, family: str) -> None:
    expected = theirs.apply_chat_template(TWO_CALLS, chat_template=TEMPLATES[family], tokenize=False)
    assert ours(TEMPLATES[family], TWO_CALLS, add_generation_prompt=False) == expected


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("content", ["The weather in", "The weather in ", "  a\n"])
def test_a_message_is_continued_as_transformers_does(theirs: Any, family: str, content: str) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    expected = theirs.apply_chat_template(
        messages, chat_template=TEMPLATES[family], tokenize=False, continue_final_message=True
    )
    assert ours(TEMPLATES[family], messages, continue_final_message=True) == expected
    assert expected.rstrip().endswith(content.strip())


def test_variables_reach_the_template(theirs: Any) -> None:
    expected = theirs.apply_chat_template(
        [USER], chat_template=HERMES, tokenize=False, add_generation_prompt=True, enable_thinking=False,
        reasoning_effort="low",
    )  # fmt: skip
    given = ours(HERMES, [USER], chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low")
    assert given == expected and expected.endswith("</think>\n\n(low)")
    assert ours(HERMES, [USER], add_generation_prompt=False).endswith("<|im_end|>\n")


def test_text_parts_are_joined_and_empty_arguments_are_an_object() -> None:
    parts = [{"type": "text", "text": "How is "}, {"type": "text", "text": "Paris?"}]
    assert ours(HERMES, [{"role": "user", "content": parts}]) == ours(HERMES, [USER])
    raw = json.dumps({"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]}).encode()
    body = parse_body(ChatBody, raw, PromptLimits(1 << 16, 1 << 16, 2048))
    assert chat_prompt(body, body.messages).messages[1]["tool_calls"][0]["function"]["arguments"] == {}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [USER, {"role": "assistant", "content": None, "tool_calls": []}]}, "messages[1].content"),
    ({"messages": [{**USER, "tool_calls": [call("f", {})]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio"}]}]},
     "messages[0].content[1]"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "odd"}]}]}, "messages[0].content[0].type"),
    ({"messages": [USER], "chat_template": "{{ 1 }}"}, "chat_template"),
    ({"messages": [USER], "continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"messages": [CALLED], "continue_final_message": True}, "continue_final_message"),
    ({"messages": [USER], "reasoning_effort": "extreme"}, "reasoning_effort"),
    ({"messages": [USER], "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"messages": [USER], "chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs"),
    ({"messages": [USER], "chat_template_kwargs": {"raise_exception": "x"}}, "chat_template_kwargs"),
    ({"messages": [USER], "tool_choice": "required"}, "tool_choice"),
    ({"messages": [USER], "tool_choice": "perhaps"}, "tool_choice"),
    ({"messages": [USER], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"messages": [USER], "tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "f"}}},
     "tool_choice.function.name"),
    ({"messages": [USER], "tools": [{"x": 1}]}, "tools[0].function"),
    ({"messages": [USER], "tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].type"),
    ({"messages": [USER], "tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"messages": [USER], "tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]},
     "tools[0].function.parameters"),
    ({"messages": [USER], "tools": [WEATHER, WEATHER]}, "tools"),
    ({"messages": [USER], "tools": [TIME] * 129}, "tools"),
    ({"messages": [USER], "tools": [WEATHER], "response_format": {"type": "json_object"}}, "response_format"),
]  # fmt: skip


def plan(body: dict[str, Any], template: str = HERMES) -> Any:
    from gateway.api.chat_fields import tool_choice

    parsed = parse_body(ChatBody, json.dumps(body).encode(), PromptLimits(1 << 16, 1 << 16, 2048))
    assets = make_assets(chat_template=template, special_tokens=SPECIAL)
    [wanted] = parsed.all_wanted()
    return wanted, ChatPlanner(assets).plan(wanted, tool_choice(parsed))


@pytest.mark.parametrize(("body", "field"), BAD)
def test_what_is_wrong_is_named(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        plan(body)
    assert error.value.violations[0].field == field


@pytest.mark.parametrize("text", ["[1]", "{", "nan", '"x"', "[" * 5000], ids=lambda text: text[:9])
def test_arguments_of_a_history_must_be_an_object(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"messages\[1\].tool_calls\[0\].function.arguments"):
        plan({"messages": [USER, {**CALLED, "tool_calls": [{"function": {"name": "f", "arguments": text}}]}]})


def test_an_image_gets_its_own_sentence() -> None:
    with pytest.raises(InvalidArgument, match=r"is an image .*takes text only"):
        plan({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]})


def test_a_template_that_does_not_know_tools_is_not_given_any() -> None:
    simple = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(InvalidArgument, match="chat template does not support tools"):
        plan({"messages": [USER], "tools": [WEATHER]}, simple)
    with pytest.raises(InvalidArgument, match="chat template does not support tool calls"):
        plan({"messages": [USER, CALLED, ANSWERED]}, simple)
    for asks_for_nothing in ({"tools": []}, {"tool_choice": "auto"}, {"tools": [WEATHER], "tool_choice": "none"}):
        wanted, made = plan({"messages": [USER], **asks_for_nothing}, simple)
        assert not made.reads and wanted.prompt.tools is None


def test_a_template_whose_form_of_calls_is_unknown_needs_a_parser() -> None:
    odd = "{{ tools }}<|channel|>commentary{{ messages[0].content }}"
    with pytest.raises(InvalidArgument, match="--tool-call-parser"):
        plan({"messages": [USER], "tools": [WEATHER]}, odd)
