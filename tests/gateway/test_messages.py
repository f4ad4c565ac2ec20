"""POST /v1/messages: Anthropic's format, complete and as events, its errors, and refused fields."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.intake.assets import ModelAssets
from protos.v1 import decode_pb2
from testing.gateway.parts import Fault, Script, make_assets
from tests.gateway.http_served import Served
from tests.gateway.http_served import serve as serve  # a fixture
from tests.gateway.test_responses import text_of

HI = [{"role": "user", "content": "hi"}]


async def events_of(served: Served, **body: Any) -> list[dict[str, Any]]:
    found = []
    reply = await served.post("/v1/messages", stream=True, **{"messages": HI, "max_tokens": 8, **body})
    for event in reply.text.strip().split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


async def test_a_message_has_anthropics_shape(serve: Any) -> None:
    served = await serve()
    system = [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]
    body = {"model": "tiny", "messages": HI, "max_tokens": 8, "system": system, "metadata": {"user_id": "me"}}
    reply = (await served.post("/v1/messages", **body)).json()
    text = text_of(served, "<system>be brief\n<user>hi\n<assistant>", 8)
    assert reply["content"] == [{"type": "text", "text": text}]
    assert (reply["type"], reply["role"], reply["model"]) == ("message", "assistant", "tiny")
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("max_tokens", None) and reply["id"].startswith("msg_")
    usage = reply["usage"]
    assert usage["output_tokens"] == 8 and usage["cache_read_input_tokens"] == 0
    counted = (await served.post("/v1/messages/count_tokens", messages=HI, system=system)).json()
    assert counted == {"input_tokens": usage["input_tokens"]}
    without_schema = {"format": {"type": "json_schema"}}
    refused = await served.post("/v1/messages/count_tokens", messages=HI, output_config=without_schema)
    assert refused.status_code == 400


async def test_a_stream_has_anthropics_events_and_the_same_text(serve: Any) -> None:
    served = await serve()
    whole = (await served.post("/v1/messages", messages=HI, max_tokens=30)).json()
    events = await events_of(served, max_tokens=30)
    kinds = [event["type"] for event in events]
    deltas = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert kinds[2:-3] == ["content_block_delta"] * len(deltas) and len(deltas) > 3
    assert "".join(deltas) == whole["content"][0]["text"]
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2]["usage"] == whole["usage"] and events[0]["message"]["content"] == []


async def test_the_first_and_the_last_usage_count_the_same_input(serve: Any) -> None:
    served = await serve(Script(cached_tokens=3))
    counted = (await served.post("/v1/messages/count_tokens", messages=HI)).json()["input_tokens"]
    events = await events_of(served)
    first, last = events[0]["message"]["usage"], events[-2]["usage"]
    assert (first["input_tokens"], first["cache_read_input_tokens"]) == (counted - 3, 3)
    assert first.keys() == last.keys() and {**first, "output_tokens": 8} == last


async def test_stop_sequences_and_end_of_turn(serve: Any) -> None:
    served = await serve()
    text = (await served.post("/v1/messages", messages=HI, max_tokens=30)).json()["content"][0]["text"]
    stop = text[10:13]
    reply = (await served.post("/v1/messages", messages=HI, max_tokens=30, stop_sequences=[stop])).json()
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", stop)
    assert reply["content"][0]["text"] == text[: text.index(stop)]


@pytest.mark.parametrize("content", ["It is", [{"type": "text", "text": "It "}, {"type": "text", "text": "is"}]])
async def test_the_answer_continues_a_last_message_of_the_assistant(serve: Any, content: Any) -> None:
    served = await serve()
    body = {"messages": [*HI, {"role": "assistant", "content": content}]}
    reply = (await served.post("/v1/messages", max_tokens=8, **body)).json()
    assert reply["content"] == [{"type": "text", "text": text_of(served, "<user>hi\n<assistant>It is", 8)}]
    counted = (await served.post("/v1/messages/count_tokens", **body)).json()
    assert counted == {"input_tokens": reply["usage"]["input_tokens"]}


@pytest.mark.parametrize(
    "assets", [make_assets(chat_template="{% for m in messages %}{{ m['content'] | upper }}\n{% endfor %}")]
)
async def test_a_last_message_that_the_template_changes_is_refused(serve: Any, assets: ModelAssets) -> None:
    served = await serve()
    messages = [*HI, {"role": "assistant", "content": "It is"}]
    for path, more in (("/v1/messages", {"max_tokens": 8}), ("/v1/messages/count_tokens", {})):
        reply = await served.post(path, messages=messages, **more)
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["message"].startswith("messages cannot be used: the model's chat template changes")


async def test_the_anthropic_client_reads_both(serve: Any) -> None:
    anthropic = pytest.importorskip("anthropic")
    served = await serve(api_key="s3cret")
    client = anthropic.AsyncAnthropic(base_url=served.url, api_key="s3cret", max_retries=0)
    whole = await client.messages.create(model="tiny", max_tokens=20, messages=HI)
    async with client.messages.stream(model="tiny", max_tokens=20, messages=HI) as stream:
        text = "".join([part async for part in stream.text_stream])
        final = await stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text and final.usage.output_tokens == 20
    assert (await client.messages.count_tokens(model="tiny", messages=HI)).input_tokens == whole.usage.input_tokens
    wrong = anthropic.AsyncAnthropic(base_url=served.url, api_key="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError):
        await wrong.messages.create(model="tiny", max_tokens=20, messages=HI)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens is invalid"),
    ({"max_tokens": 0}, "max_tokens must be at least 1"),
    ({"messages": []}, "messages must hold at least one message"),
    ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role must be one of user, assistant"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].name"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": ""}]}]},
        "messages[0].content[0].tool_use_id must be given",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "", "id": "1"}]}]},
        "messages[0].content[0].name must be given",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f", "id": ""}]}]},
        "messages[0].content[0].id must be given",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].type"),
    ({"messages": [*HI, {"role": "assistant", "content": "It is "}]}, "messages[1].content must not end with white"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"stop_sequences": [""]}, "stop_sequences[0] must not be empty"),
    ({"tools": [{"name": "f", "input_schema": {}}]}, "tools cannot be used: the model's chat template"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ({"tools": [{"name": "f", "input_schema": 5}]}, "tools[0].input_schema"),
    ({"tool_choice": {"type": "any"}}, "tool_choice asks for a call"),
    ({"tool_choice": {"type": "tool"}, "tools": [{"name": "f"}]}, "tool_choice.name must be given"),
    ({"tool_choice": {"type": "required"}}, "tool_choice.type must be one of"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.type"),
    ({"temperature": "hot"}, "temperature is invalid"),
]


@pytest.mark.parametrize(("body", "message"), REFUSED, ids=[message for _, message in REFUSED])
async def test_errors_have_anthropics_shape_and_name_the_field(serve: Any, body: dict[str, Any], message: str) -> None:
    served = await serve()
    for stream in (False, True):
        reply = await served.post("/v1/messages", **{"messages": HI, "max_tokens": 4, "stream": stream, **body})
        content = reply.json()
        assert reply.status_code == 400 and content["error"]["message"].startswith(message), content
        assert content["type"] == "error" and content["error"]["type"] == "invalid_request_error"
        assert content["request_id"] == reply.headers["x-request-id"]


async def test_a_model_that_is_not_served_and_a_stream_that_fails(serve: Any) -> None:
    served = await serve(Script(submits=[Fault("reject", 2, decode_pb2.REJECTION_TOO_LARGE)]))
    last = (await events_of(served, max_tokens=20))[-1]
    assert last["type"] == "error" and last["error"]["message"]
    reply = await served.post("/v1/messages", messages=HI, max_tokens=4, model="claude")
    assert reply.status_code == 404 and reply.json()["error"]["type"] == "not_found_error"
