"""Tool calls and reasoning over HTTP on real sockets, with known outputs, and with the `openai` client."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from tokenizers import AddedToken

from gateway.api.chat_plan import ChatPlanner
from gateway.api.http_app import HttpApi
from gateway.api.server import HttpServer, bind_http
from gateway.intake.assets import ModelAssets
from testing.gateway.parts import EOS_ID, VOCAB_SIZE, Script, make_assets, make_tokenizer
from testing.gateway.tool_formats import TEMPLATES
from testing.gateway.tool_templates import HERMES
from tests.gateway.conftest import MakeRig

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "get_time"}},
]
ASK: Any = [{"role": "user", "content": "How is Paris?"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")


@pytest.fixture(scope="module", params=["text", "special"])
def assets(request: pytest.FixtureRequest) -> ModelAssets:
    """The assets of a model with a Hermes template, whose markers are text or special tokens, or those of gpt-oss."""
    tokenizer = make_tokenizer()
    form, template = TEMPLATES["openai"] if request.param == "openai" else (None, HERMES)
    marks = MARKS if form is None else form.marks
    if request.param != "text":
        tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    return make_assets(chat_template=template, tokenizer=tokenizer, vocab_size=VOCAB_SIZE + len(marks))


class Served:
    def __init__(self, script: Script, assets: ModelAssets, url: str) -> None:
        self._script, self._tokenizer = script, assets.tokenizer
        self.client = httpx.AsyncClient(base_url=url, timeout=60)
        self.openai = openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0)

    def will_say(self, text: str) -> None:
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        self._script.says = [*ids, EOS_ID]

    async def chat(self, **body: Any) -> Any:
        return (await self.client.post("/v1/chat/completions", json={"messages": ASK, **body})).json()


@pytest.fixture
async def make_served(make_rig: MakeRig, assets: ModelAssets) -> AsyncIterator[Any]:
    running: list[tuple[HttpServer, Served]] = []

    async def make(**options: Any) -> Served:
        script = Script()
        rig = await make_rig(script, max_model_len=2048)
        front = replace(rig.front, planner=ChatPlanner(assets, **options))
        sock = bind_http("127.0.0.1", 0)
        app = HttpApi(front).app(lambda: rig.workers.ready, show_metrics=True, timeout_s=20.0)
        server = HttpServer(app, sock)
        await server.start()
        running.append((server, Served(script, assets, f"http://127.0.0.1:{sock.getsockname()[1]}")))
        return running[-1][1]

    yield make
    for server, served in running:
        await served.client.aclose()
        await served.openai.close()
        await server.stop(1.0)


@pytest.fixture
async def served(make_served: Any) -> Served:
    made: Served = await make_served()
    return made


async def streamed(served: Served, **body: Any) -> tuple[dict[int, Any], list[Any]]:
    """Returns the messages that result from a stream's deltas, by choice, and all chunks."""
    messages: dict[int, Any] = {}
    stream = await served.openai.chat.completions.create(
        model="tiny", messages=body.pop("messages", ASK), stream=True, **body
    )
    chunks = [chunk async for chunk in stream]
    for chunk in chunks:
        for choice in chunk.choices:
            said = messages.setdefault(choice.index, {"content": "", "reasoning_content": "", "calls": [], "end": None})
            said["content"] += choice.delta.content or ""
            said["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
            for part in choice.delta.tool_calls or ():
                if part.id is not None:
                    assert part.index == len(said["calls"]) and part.type == "function"
                    assert part.function.name and part.function.arguments == ""
                    said["calls"].append({"id": part.id, "name": part.function.name, "arguments": ""})
                else:
                    assert part.index == len(said["calls"]) - 1 and part.function.name is None
                    said["calls"][-1]["arguments"] += part.function.arguments
            said["end"] = choice.finish_reason or said["end"]
    return messages, chunks


async def test_a_call_is_read_whole_with_the_openai_client(served: Served) -> None:
    served.will_say("Let me see.\n" + CALL)
    reply = await served.openai.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS)
    [choice] = reply.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see.\n"
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert call.type == "function" and re.fullmatch(r"call_[0-9a-f]{24}", call.id)
    assert call.function.name == "get_weather" and json.loads(call.function.arguments) == {"city": "Paris"}


THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


@pytest.mark.parametrize("assets", ["openai"], indirect=True)
async def test_an_answer_of_gpt_oss_is_read_with_and_without_tools(served: Served) -> None:
    served.will_say(THOUGHT + "<|channel|>final<|message|>Hello")
    for tools in ({}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}):
        [choice] = (await served.chat(**tools))["choices"]
        assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("Hm.", "Hello"), tools
        messages, _ = await streamed(served, **tools)
        assert (messages[0]["reasoning_content"], messages[0]["content"]) == ("Hm.", "Hello"), tools
    served.will_say(
        THOUGHT + '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "P"}'
    )
    [choice] = (await served.chat(tools=TOOLS))["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "P"}'}
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    assert "distinguished" in (await served.chat(tools=strict))["error"]["message"]


async def test_a_stream_adds_up_to_the_whole(served: Served) -> None:
    served.will_say(CALL + "\n" + CALL.replace("Paris", "Rome"))
    whole = (await served.chat(tools=TOOLS))["choices"][0]
    messages, chunks = await streamed(served, tools=TOOLS, stream_options={"include_usage": True})
    assert whole["message"]["content"] is None and messages[0]["content"] == ""
    assert messages[0]["end"] == whole["finish_reason"] == "tool_calls"
    calls = [c["function"] for c in whole["message"]["tool_calls"]]
    assert [{k: c[k] for k in ("name", "arguments")} for c in messages[0]["calls"]] == calls
    assert [json.loads(c["arguments"])["city"] for c in calls] == ["Paris", "Rome"]
    assert len({c["id"] for c in messages[0]["calls"]}) == 2
    pieces = [p.function.arguments for c in chunks for choice in c.choices for p in choice.delta.tool_calls or ()]
    assert len([p for p in pieces if p]) > 4, "arguments arrive in pieces"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens > 20


async def test_every_sample_is_read_by_itself(served: Served) -> None:
    served.will_say(CALL)
    reply = await served.chat(tools=TOOLS, n=3)
    calls = [choice["message"]["tool_calls"][0] for choice in reply["choices"]]
    assert [call["function"]["name"] for call in calls] == ["get_weather"] * 3
    assert len({call["id"] for call in calls}) == 3
    messages, _ = await streamed(served, tools=TOOLS, n=3)
    assert [json.loads(messages[i]["calls"][0]["arguments"]) for i in range(3)] == [{"city": "Paris"}] * 3


async def test_what_is_no_call_is_content(served: Served) -> None:
    for text in ("It is < 5 degrees.", "<tool_call>oops</tool_call>", '<tool_call>\n{"name": "get_w'):
        served.will_say(text)
        whole = (await served.chat(tools=TOOLS))["choices"][0]
        assert whole["message"] == {"role": "assistant", "content": text, "refusal": None}
        assert whole["finish_reason"] == "stop"
        messages, _ = await streamed(served, tools=TOOLS)
        assert messages[0]["content"] == text and messages[0]["end"] == "stop"


async def test_without_tools_nothing_is_read(served: Served) -> None:
    served.will_say(CALL)
    for fields in ({}, {"tool_choice": "auto"}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
        choice = (await served.chat(**fields))["choices"][0]
        assert "tool_calls" not in choice["message"] and '"Paris"' in choice["message"]["content"]
        assert choice["finish_reason"] == "stop"


async def test_a_call_that_max_tokens_cuts_off_says_so(served: Served) -> None:
    served.will_say(CALL)
    tokens = len(served._tokenizer.encode(CALL, add_special_tokens=False).ids)
    choice = (await served.chat(tools=TOOLS, max_tokens=tokens - 12))["choices"][0]
    assert choice["finish_reason"] == "length" and choice["message"]["tool_calls"][0]["function"]["name"]


async def test_one_call_at_a_time_if_asked_for(served: Served) -> None:
    served.will_say(CALL * 2)
    message = (await served.chat(tools=TOOLS, parallel_tool_calls=False))["choices"][0]["message"]
    assert len(message["tool_calls"]) == 1 and message["content"] is None
    assert len((await streamed(served, tools=TOOLS, parallel_tool_calls=False))[0][0]["calls"]) == 1
    assert len((await served.chat(tools=TOOLS))["choices"][0]["message"]["tool_calls"]) == 2


async def test_logprobs_of_all_tokens_come_with_calls(served: Served) -> None:
    served.will_say("Hm. " + CALL)
    whole = await served.chat(tools=TOOLS, logprobs=True)
    shown = whole["choices"][0]["logprobs"]["content"]
    assert len(shown) == whole["usage"]["completion_tokens"]
    _, chunks = await streamed(served, tools=TOOLS, logprobs=True)
    parts = [c.logprobs.content for chunk in chunks for c in chunk.choices if c.logprobs is not None]
    assert [t.token for part in parts for t in part] == [t["token"] for t in shown]


async def test_the_tools_and_the_history_are_in_the_prompt(served: Served) -> None:
    served.will_say("Sunny.")
    function = {"name": "get_weather", "arguments": '{"city":"Paris"}'}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    called: Any = {"role": "assistant", "content": None, "tool_calls": calls}
    told: Any = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sun"}]}
    reply: Any = await served.openai.chat.completions.create(model="tiny", messages=[*ASK, called, told], tools=TOOLS)
    assert reply.choices[0].message.content == "Sunny."
    body = {"messages": [*ASK, called, told], "tools": TOOLS}
    ids = (await served.client.post("/tokenize", json=body)).json()["tokens"]
    assert reply.usage.prompt_tokens == len(ids)
    text = served._tokenizer.decode(ids, skip_special_tokens=False)
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>' in text
    assert "<tool_response>\nsun\n</tool_response>" in text and '"get_time"' in text


async def test_an_answer_can_be_sent_back_as_it_came(served: Served) -> None:
    served.will_say(CALL)
    first = await served.openai.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS)
    message = first.choices[0].message
    assert message.tool_calls is not None
    told: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sun"}
    served.will_say("Sunny.")
    second = await served.openai.chat.completions.create(model="tiny", messages=[*ASK, message, told], tools=TOOLS)
    assert second.choices[0].message.content == "Sunny." and second.choices[0].finish_reason == "stop"


async def test_reasoning_is_split_off(make_served: Any) -> None:
    served = await make_served(reasoning="qwen3")
    served.will_say("<think>\nHm.\n</think>\n\nIt is 5." + CALL)
    whole = (await served.chat(tools=TOOLS))["choices"][0]
    assert whole["message"]["reasoning_content"] == "\nHm.\n" and whole["message"]["content"] == "\n\nIt is 5."
    assert whole["finish_reason"] == "tool_calls" and len(whole["message"]["tool_calls"]) == 1
    said = (await streamed(served, tools=TOOLS))[0][0]
    assert said["reasoning_content"] == "\nHm.\n" and said["content"] == "\n\nIt is 5." and len(said["calls"]) == 1
    plain = (await served.chat())["choices"][0]["message"]
    assert plain["reasoning_content"] == "\nHm.\n" and plain["content"].startswith("\n\nIt is 5.")
    off = (await served.chat(chat_template_kwargs={"enable_thinking": False}))["choices"][0]["message"]
    assert off["reasoning_content"] == "\nHm.\n", "the output says so itself"
    served.will_say("It is 5.")
    message = (await served.chat(chat_template_kwargs={"enable_thinking": False}))["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "It is 5.", "refusal": None}


async def test_deepseek_reasons_without_the_first_tag(make_served: Any) -> None:
    served = await make_served(reasoning="deepseek_r1")
    served.will_say("Hm.\n</think>It is 5.")
    message = (await served.chat())["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.\n", "It is 5.")
    said = (await streamed(served))[0][0]
    assert (said["reasoning_content"], said["content"]) == ("Hm.\n", "It is 5.")
    served.will_say(" is 5.")
    begun = [*ASK, {"role": "assistant", "content": "The answer"}]
    message = (await served.chat(messages=begun, continue_final_message=True))["choices"][0]["message"]
    assert message["content"] == " is 5." and "reasoning_content" not in message


async def test_reasoning_tags_stay_without_the_parser(make_served: Any, assets: ModelAssets) -> None:
    served = await make_served()
    served.will_say("<think>a</think>b")
    content = (await served.chat())["choices"][0]["message"]["content"]
    hidden = assets.tokenizer.token_to_id("<think>") is not None
    assert content == ("ab" if hidden else "<think>a</think>b"), "special tokens are no text unless a parser needs them"


async def test_a_bad_tool_is_a_400_that_names_it(served: Served) -> None:
    for field, value in (("tools", [{"type": "function", "function": {"name": ""}}]), ("tool_choice", "required")):
        reply = await served.client.post("/v1/chat/completions", json={"messages": ASK, field: value})
        error = reply.json()["error"]
        assert reply.status_code == 400 and error["param"].startswith(field), error
    large = [{"type": "function", "function": {"name": "f", "description": "x" * 200_000}}]
    reply = await served.client.post("/v1/chat/completions", json={"messages": ASK, "tools": large})
    assert reply.status_code == 400 and "196608" in reply.json()["error"]["message"]
