"""The `anthropic` package against /v1/messages."""

from __future__ import annotations

from typing import Any

import anthropic
from tried import MODEL, TOOLS_URL, URL, refused, run, works

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
agent = anthropic.Anthropic(base_url=TOOLS_URL, api_key="none", max_retries=0)
ASK: Any = [{"role": "user", "content": "Tell me a story."}]
asked: Any = {
    "model": MODEL,
    "max_tokens": 16,
    "messages": ASK,
    "system": "Be brief.",
    "extra_body": {"temperature": 0},
}


@works("messages.create with usage")
def create() -> None:
    message = client.messages.create(**asked)
    assert message.content[0].text and message.usage.output_tokens <= 16
    assert message.stop_reason in ("max_tokens", "end_turn")


@works("messages.stream, and raw events")
def stream() -> None:
    whole = client.messages.create(**asked).content[0].text
    with client.messages.stream(**asked) as events:
        assert "".join(events.text_stream) == whole
        assert events.get_final_message().content[0].text == whole
    kinds = [event.type for event in client.messages.create(**asked, stream=True)]
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"


@works("stop_sequences, turns, system as blocks")
def fields() -> None:
    turns = [*ASK, {"role": "assistant", "content": "Once"}, {"role": "user", "content": "More."}]
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    message = client.messages.create(
        model=MODEL, max_tokens=50, messages=turns, system=system, stop_sequences=[" "], extra_body={"temperature": 0}
    )
    assert message.stop_reason == "stop_sequence" and message.stop_sequence == " "


@works("messages.count_tokens")
def count() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=ASK, system="Be brief.").input_tokens
    usage = client.messages.create(**asked).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@works("models.list")
def models() -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


@works("errors: BadRequestError, NotFoundError")
def errors() -> None:
    for fields, kind in (({"max_tokens": -1}, anthropic.BadRequestError), ({"model": "x"}, anthropic.NotFoundError)):
        try:
            client.messages.create(**{**asked, **fields})
        except kind as error:
            assert error.body["type"] == "error", error.body
        else:
            raise AssertionError(f"{fields} was taken")


@works("tools: an enforced call (also streamed), whose result is sent back")
def tools() -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    told: Any = {"model": MODEL, "max_tokens": 100, "tools": [{"name": "get_weather", "input_schema": schema}]}
    choice: Any = {"type": "tool", "name": "get_weather"}
    message = agent.messages.create(**told, messages=ASK, tool_choice=choice, extra_body={"temperature": 0})
    [call] = message.content
    assert message.stop_reason == "tool_use" and call.input["city"] in ("Paris", "Rome")
    with agent.messages.stream(**told, messages=ASK, tool_choice=choice, extra_body={"temperature": 0}) as events:
        assert events.get_final_message().content[0].input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sun"}
    turns: Any = [*ASK, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    assert agent.messages.create(**told | {"max_tokens": 8}, messages=turns).usage


@refused("tools with the built-in model, whose template does not support them", "tools")
def no_tools() -> None:
    client.messages.create(**asked, tools=[{"name": "now", "input_schema": {"type": "object"}}])


@refused("thinking", "thinking")
def thinking() -> None:
    client.messages.create(**asked, thinking={"type": "enabled", "budget_tokens": 1024})


@refused("images", "image")
def images() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AA=="}
    client.messages.create(
        **{**asked, "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}
    )


run()
