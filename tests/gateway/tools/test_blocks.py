"""Tools in /v1/responses and /v1/messages with known outputs, whole and as events. A history must give the same prompt
as the equivalent chat.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gateway.tools.test_http_tools import ASK, CALL, PARAMETERS, TOOLS, Served
from tests.gateway.tools.test_http_tools import assets as assets  # fixtures
from tests.gateway.tools.test_http_tools import make_served as make_served
from tests.gateway.tools.test_http_tools import served as served

FLAT: Any = [
    {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": False},
    {"type": "function", "name": "get_time", "parameters": {"type": "object", "properties": {}}, "strict": False},
]
CLAUDE: Any = [{"name": "get_weather", "input_schema": PARAMETERS}, {"name": "get_time", "input_schema": {}}]
TWO = "Let me see.\n" + CALL + "\n" + CALL.replace("Paris", "Rome")


async def test_a_response_has_items_of_text_and_calls(served: Served) -> None:
    served.will_say(TWO)
    reply = await served.openai.responses.create(model="tiny", input="How is Paris?", tools=FLAT)
    assert [item.type for item in reply.output] == ["message", "function_call", "function_call"]
    assert reply.output_text == "Let me see.\n" and reply.status == "completed"
    calls: Any = reply.output[1:]
    assert [(call.name, json.loads(call.arguments)["city"], call.status) for call in calls] == [
        ("get_weather", "Paris", "completed"), ("get_weather", "Rome", "completed"),
    ]  # fmt: skip
    assert len({call.call_id for call in calls}) == 2 and len({item.id for item in reply.output}) == 3
    assert [tool.model_dump(exclude_none=True) for tool in reply.tools] == FLAT and reply.parallel_tool_calls


async def test_the_events_of_a_response_add_up_to_its_items(served: Served) -> None:
    served.will_say(TWO)
    whole = await served.openai.responses.create(model="tiny", input="How is Paris?", tools=FLAT)
    async with served.openai.responses.stream(model="tiny", input="How is Paris?", tools=FLAT) as stream:
        events = [event async for event in stream]
    kinds = [event.type for event in events if not event.type.endswith("delta")]
    call = ["output_item.added", "function_call_arguments.done", "output_item.done"]
    text = ["output_item.added", "content_part.added", "output_text.done", "content_part.done", "output_item.done"]
    assert kinds == [f"response.{k}" for k in ("created", "in_progress", *text, *call, *call, "completed")]
    pieces = [event for event in events if event.type == "response.function_call_arguments.delta"]
    for index in (1, 2):
        own = "".join(piece.delta for piece in pieces if piece.output_index == index)
        assert own == whole.output[index].arguments and len(pieces) > 8, "arguments arrive in pieces"
    last = events[-1].response
    assert [item.type for item in last.output] == [item.type for item in whole.output]
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_a_response_counts_the_tokens_of_its_reasoning(make_served: Any) -> None:
    served: Served = await make_served(reasoning="deepseek_r1")
    thought, said = "Two and three are five.", "</think>It is 5."
    served.will_say(thought + said)
    size, rest = (len(served._tokenizer.encode(text, add_special_tokens=False).ids) for text in (thought, said))
    reply = await served.openai.responses.create(model="tiny", input="2 + 3?")
    assert [item.type for item in reply.output] == ["reasoning", "message"] and reply.usage is not None
    assert 0 <= reply.usage.output_tokens_details.reasoning_tokens - size <= 2, "of a tag's first token"
    assert reply.usage.output_tokens == size + rest + 1
    served.will_say("</think>It is 5.")
    reply = await served.openai.responses.create(model="tiny", input="2 + 3?")
    assert reply.usage is not None and reply.usage.output_tokens_details.reasoning_tokens == 0


async def test_a_call_that_is_cut_off_is_incomplete(served: Served) -> None:
    served.will_say(CALL)
    size = len(served._tokenizer.encode(CALL, add_special_tokens=False).ids)
    reply = await served.openai.responses.create(
        model="tiny", input="How is Paris?", tools=FLAT, max_output_tokens=size - 12
    )
    assert reply.status == "incomplete" and [item.type for item in reply.output] == ["function_call"]
    assert reply.output[0].status == "incomplete"
    told = {"messages": ASK, "tools": CLAUDE, "max_tokens": size - 12}
    assert (await served.client.post("/v1/messages", json=told)).json()["stop_reason"] == "max_tokens"


async def test_a_message_has_blocks_of_text_and_calls(served: Served) -> None:
    served.will_say(TWO)
    body: Any = {"messages": ASK, "tools": CLAUDE, "max_tokens": 500}
    reply = (await served.client.post("/v1/messages", json=body)).json()
    assert [block["type"] for block in reply["content"]] == ["text", "tool_use", "tool_use"]
    assert [block["input"]["city"] for block in reply["content"][1:]] == ["Paris", "Rome"]
    assert reply["stop_reason"] == "tool_use" and reply["content"][0]["text"] == "Let me see.\n"
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.AsyncAnthropic(base_url=str(served.client.base_url), api_key="none", max_retries=0)
    async with client.messages.stream(model="tiny", **body) as stream:
        final = await stream.get_final_message()
    shown = [block.model_dump(exclude={"id"}, exclude_none=True) for block in final.content]
    assert shown == [{k: v for k, v in block.items() if k != "id"} for block in reply["content"]]
    assert final.stop_reason == "tool_use"


async def test_the_events_of_a_message_bring_arguments_in_pieces(served: Served) -> None:
    served.will_say(TWO)
    body = {"messages": ASK, "tools": CLAUDE, "max_tokens": 500, "stream": True}
    text = (await served.client.post("/v1/messages", json=body)).text
    events = [json.loads(event.split("\ndata: ")[1]) for event in text.strip().split("\n\n")]
    kinds = [event["type"] for event in events if event["type"] != "content_block_delta"]
    assert kinds == [
        "message_start",
        *["content_block_start", "content_block_stop"] * 3,
        "message_delta",
        "message_stop",
    ]
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [start["type"] for start in starts] == ["text", "tool_use", "tool_use"] and starts[1]["input"] == {}
    pieces = [e["delta"]["partial_json"] for e in events if e.get("index") == 2 and e["type"] == "content_block_delta"]
    assert json.loads("".join(pieces)) == {"city": "Rome"} and len(pieces) > 4


async def test_reasoning_is_an_item_and_a_block_of_its_own(make_served: Any) -> None:
    served = await make_served(reasoning="qwen3")
    served.will_say("<think>\nHm.\n</think>\n\nIt is 5.")
    reply = await served.openai.responses.create(model="tiny", input="How is Paris?")
    assert [item.type for item in reply.output] == ["reasoning", "message"]
    assert reply.output[0].content[0].text == "\nHm.\n" and reply.output_text == "\n\nIt is 5."
    body = {"messages": ASK, "max_tokens": 500}
    content = (await served.client.post("/v1/messages", json=body)).json()["content"]
    assert [block["type"] for block in content] == ["thinking", "text"] and content[0]["thinking"] == "\nHm.\n"


async def test_a_history_gives_the_prompt_that_the_same_chat_gives(served: Served) -> None:
    served.will_say("Sunny.")
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": "get_weather", "arguments": f'{{"city":"{c}"}}'}}
        for i, c in enumerate(("Paris", "Rome"))
    ]
    told = [{"role": "tool", "tool_call_id": f"call_{i}", "content": "sun"} for i in range(2)]
    called = {"role": "assistant", "content": "Hm.", "tool_calls": calls, "reasoning_content": "Thinking."}
    chat = await served.chat(messages=[*ASK, called, *told], tools=TOOLS)
    items = [
        *ASK,
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Thinking."}],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hm."}]},
        *({"type": "function_call", "call_id": c["id"], **c["function"]} for c in calls),
        *({"type": "function_call_output", "call_id": f"call_{i}", "output": "sun"} for i in range(2)),
    ]
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    reply = (await served.client.post("/v1/responses", json={"input": items, "tools": tools})).json()
    assert reply["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"], reply
    blocks = [
        {"type": "thinking", "thinking": "Thinking.", "signature": ""},
        {"type": "text", "text": "Hm."},
        *({"type": "tool_use", "id": c["id"], "name": "get_weather", "input": json.loads(c["function"]["arguments"])}
          for c in calls),
    ]  # fmt: skip
    results = [{"type": "tool_result", "tool_use_id": f"call_{i}", "content": "sun"} for i in range(2)]
    turns = [*ASK, {"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    own = [{"name": t["function"]["name"], "input_schema": t["function"].get("parameters")} for t in TOOLS]
    body = {"messages": turns, "tools": own, "max_tokens": 9}
    reply = (await served.client.post("/v1/messages", json=body)).json()
    assert reply["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"] and reply["stop_reason"] == "end_turn"
    counted = await served.client.post("/v1/messages/count_tokens", json={"messages": turns, "tools": own})
    assert counted.json() == {"input_tokens": chat["usage"]["prompt_tokens"]}
    none = {"messages": turns, "tools": own, "tool_choice": {"type": "none"}}
    left = (await served.client.post("/v1/messages/count_tokens", json=none)).json()["input_tokens"]
    assert left < counted.json()["input_tokens"]


async def test_one_call_at_a_time_if_the_client_asks_for_it(served: Served) -> None:
    served.will_say(CALL * 2)
    body: Any = {"input": "How is Paris?", "tools": FLAT, "parallel_tool_calls": False}
    assert len((await served.client.post("/v1/responses", json=body)).json()["output"]) == 1
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    body = {"messages": ASK, "tools": CLAUDE, "tool_choice": choice, "max_tokens": 500}
    assert len((await served.client.post("/v1/messages", json=body)).json()["content"]) == 1
