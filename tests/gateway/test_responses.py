"""POST /v1/responses: the types of the openai client, complete and as events, and refused fields."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from common.errors import Internal
from gateway.api.http_options import HttpOptions
from protos.v1 import decode_pb2
from testing.gateway.parts import Fault, Script, expected_ids
from tests.gateway.http_served import Served
from tests.gateway.http_served import serve as serve  # a fixture
from tests.gateway.test_requests import until


def client_of(served: Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)


def text_of(served: Served, prompt: str, count: int) -> str:
    tokenizer = served.rig.assets.tokenizer
    return str(tokenizer.decode(expected_ids(tokenizer.encode(prompt, add_special_tokens=False).ids, count)))


async def events_of(served: Served, **body: Any) -> list[dict[str, Any]]:
    """Returns the events of a stream. Checks each event's name against its data."""
    found = []
    for event in (await served.post("/v1/responses", stream=True, **body)).text.strip().split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


async def test_the_openai_client_gets_a_whole_response(serve: Any) -> None:
    served = await serve()
    reply = await client_of(served).responses.create(
        model="tiny", input="hi", instructions="be brief", max_output_tokens=8, temperature=0.5, metadata={"a": "b"}
    )
    assert reply.output_text == text_of(served, "<system>be brief\n<user>hi\n<assistant>", 8)
    assert reply.status == "incomplete" and reply.incomplete_details is not None
    assert reply.incomplete_details.reason == "max_output_tokens"
    assert reply.usage is not None and reply.usage.output_tokens == 8
    assert (
        reply.usage.total_tokens == reply.usage.input_tokens + 8 and reply.usage.input_tokens_details.cached_tokens == 0
    )
    assert reply.temperature == 0.5 and reply.metadata == {"a": "b"} and reply.instructions == "be brief"
    assert reply.id.startswith("resp_") and reply.output[0].id is not None and reply.output[0].id.startswith("msg_")
    assert reply.error is None and reply.model == "tiny"


async def test_the_openai_client_gets_typed_events(serve: Any) -> None:
    served = await serve()
    whole = await client_of(served).responses.create(model="tiny", input="hi", max_output_tokens=30)
    stream = await client_of(served).responses.create(model="tiny", input="hi", max_output_tokens=30, stream=True)
    events = [event async for event in stream]
    kinds = [event.type for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert kinds[4:-4] == ["response.output_text.delta"] * len(deltas) and len(deltas) > 3
    assert "".join(deltas) == whole.output_text == events[-4].text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1].response
    assert last.output_text == whole.output_text and last.usage == whole.usage
    assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1


async def test_a_response_that_ends_by_itself_is_completed(serve: Any) -> None:
    served = await serve()
    prompt_ids = served.rig.assets.tokenizer.encode("<user>hi\n<assistant>", add_special_tokens=False).ids
    stop_id = expected_ids(prompt_ids, 5)[4]
    body = {"input": "hi", "max_output_tokens": 30, "stop_token_ids": [stop_id]}
    reply = (await served.post("/v1/responses", **body)).json()
    assert reply["status"] == "completed" and reply["incomplete_details"] is None
    assert reply["output"][0]["status"] == "completed" and reply["looseleaf"]["attempts"] == 1
    assert (await events_of(served, **body))[-1]["type"] == "response.completed"


async def test_a_conversation_is_given_as_items(serve: Any) -> None:
    served = await serve()
    client = client_of(served)
    first = await client.responses.create(model="tiny", input="hi", max_output_tokens=4)
    said = first.output_text
    items: Any = [
        {"role": "user", "content": "hi"},
        *[item.model_dump() for item in first.output],
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in ("and ", "then")]},
    ]
    second = await client.responses.create(model="tiny", input=items, max_output_tokens=4)
    assert second.output_text == text_of(served, f"<user>hi\n<assistant>{said}\n<user>and then\n<assistant>", 4)


async def test_nothing_is_stored_and_that_is_said(serve: Any) -> None:
    served = await serve()
    reply = await served.post("/v1/responses", input="hi", max_output_tokens=1, store=True)
    assert reply.status_code == 200 and reply.json()["store"] is False
    assert "nothing is stored" in reply.headers["x-looseleaf-warning"]
    for store in (False, None):
        reply = await served.post("/v1/responses", input="hi", max_output_tokens=1, store=store)
        assert "x-looseleaf-warning" not in reply.headers
    reply = await served.post("/v1/responses", input="hi", previous_response_id="resp_1")
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "previous_response_id"
    assert "nothing is stored" in reply.json()["error"]["message"]
    with pytest.raises(openai.NotFoundError):
        await client_of(served).responses.retrieve("resp_1")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "input"),
    ({"input": None}, "input"),
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    ({"input": [{"content": "x"}]}, "input[0].role"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"}]}, "input[0]"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{", "call_id": "c"}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
    ({"input": [{"type": "computer_call"}]}, "input[0].type"),
    ({"input": [{"role": "system", "content": "x" * 40000}]}, "input"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]},
        "input[0].content[0].type",
    ),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": "x", "text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"input": "x", "tools": [{"type": "function", "name": "f"}]}, "tools"),  # the template does not know tools
    ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"input": "x", "tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
    ({"input": "x", "tools": [{"type": "function", "name": "f", "strict": 1}]}, "tools[0].strict"),
    ({"input": "x", "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"input": "x", "tool_choice": "required"}, "tool_choice"),
    ({"input": "x", "reasoning": {"effort": "utmost"}}, "reasoning.effort"),
    ({"input": "x", "background": True}, "background"),
    ({"input": "x", "conversation": "conv_1"}, "conversation"),
    ({"input": "x", "truncation": "auto"}, "truncation"),
    ({"input": "x", "include": ["message.output_text.logprobs"]}, "include[0]"),
    ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
    ({"input": "x", "max_output_tokens": "many"}, "max_output_tokens"),
    ({"input": "x", "temperature": 3}, "temperature"),
    ({"input": "x", "metadata": {"a": 1}}, "metadata"),
]


@pytest.mark.parametrize(("body", "param"), REFUSED, ids=[param for _, param in REFUSED])
async def test_what_is_refused_names_the_field(serve: Any, body: dict[str, Any], param: str) -> None:
    served = await serve()
    for stream in (False, True):
        reply = await served.post("/v1/responses", **body, stream=stream)
        error = reply.json()["error"]
        assert reply.status_code == 400 and error["param"] == param, error
        assert error["message"].startswith(param)


async def test_what_asks_for_nothing_is_accepted(serve: Any) -> None:
    served = await serve(http=HttpOptions(strict_fields=True))
    quiet = {
        "tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "text": {"format": {"type": "text"}},
        "reasoning": {"effort": None, "summary": "auto"}, "include": ["reasoning.encrypted_content"], "user": "me",
        "truncation": "disabled", "background": False, "previous_response_id": None, "service_tier": "auto",
        "prompt_cache_key": "k", "stream_options": {"include_obfuscation": False}, "max_tool_calls": 3,
    }  # fmt: skip
    reply = await served.post("/v1/responses", input="hi", max_output_tokens=2, **quiet)
    assert reply.status_code == 200, reply.text
    assert (await served.post("/v1/responses", input="hi", frob=1)).json()["error"]["param"] == "frob"


async def test_a_stream_that_fails_says_so_in_its_own_form(serve: Any) -> None:
    reject = Fault("reject", 2, decode_pb2.REJECTION_TOO_LARGE)
    served = await serve(Script(submits=[reject]))
    *_, last = await events_of(served, input="hi", max_output_tokens=20)
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error" and last["response"]["error"]["message"]
    served.rig.script.prefills += [Internal("it is so")] * 6
    reply = await served.post("/v1/responses", input="hi", stream=True)
    assert reply.status_code == 500 and reply.json()["error"]["code"] == "internal"


async def test_a_client_that_goes_away_cancels_its_response(serve: Any) -> None:
    served = await serve(Script(step_s=0.02))
    body = {"input": "hi", "max_output_tokens": 300, "stream": True}
    async with served.client.stream("POST", "/v1/responses", json=body) as reply:
        async for line in reply.aiter_lines():
            if "output_text.delta" in line:
                break
    await until(lambda: len(served.rig.script.cancelled) == 1)
    await asyncio.sleep(0.05)
    assert served.rig.admission.current == 0
