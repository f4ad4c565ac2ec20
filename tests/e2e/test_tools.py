"""Tools with real services and the `openai` client: enforced calls, streams, results that are sent back, the
example."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from tokenizers import AddedToken, Tokenizer

from engine.tiny import make_checkpoint
from looseleaf import LLM
from testing.gateway.tool_templates import HERMES, LLAMA3, MISTRAL
from testing.tool_chats import run_family

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = {"hermes": HERMES, "llama3": LLAMA3, "mistral": MISTRAL}
MARKS = {"hermes": ("<tool_call>", "</tool_call>"), "llama3": ("<|python_tag|>",), "mistral": ("[TOOL_CALLS]",)}
CITIES = ["Paris", 'R"o {m} e', "</tool_call>"]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": CITIES}, "sure": {"type": "boolean"}},
            "required": ["city", "sure"],
            "additionalProperties": False,
        },
    },
}
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": -5, "maximum": 5}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
NOW: Any = {"type": "function", "function": {"name": "now"}}
ASK: Any = [{"role": "user", "content": "How is Paris?"}]


@pytest.fixture(scope="module", params=list(TEMPLATES))
def tools_llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A server with a random model and the chat template of a family, whose markers are special tokens."""
    directory = tmp_path_factory.mktemp("models") / request.param
    make_checkpoint(directory, "llama", seed=1, dtype=torch.bfloat16, vocab_size=520)
    (directory / "chat_template.jinja").write_text(TEMPLATES[request.param], encoding="utf-8")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    marks = [AddedToken(mark, special=True, normalized=False) for mark in MARKS[request.param]]
    tokenizer.add_special_tokens(marks)
    tokenizer.save(str(directory / "tokenizer.json"))
    with LLM(str(directory), num_blocks=2048, max_model_len=2048, roles="both") as running:
        yield running


@pytest.fixture
def client(tools_llm: LLM) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{tools_llm.addresses.http}/v1", api_key="none", max_retries=0)


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(
        **{"model": "", "messages": ASK, "tools": [WEATHER, ADD, NOW], "parallel_tool_calls": False, **fields}
    )


def check(name: str, arguments: str) -> None:
    """Raises if the arguments do not match the tool's schema."""
    given = json.loads(arguments)
    if name == "get_weather":
        assert set(given) == {"city", "sure"} and given["city"] in CITIES and isinstance(given["sure"], bool)
    elif name == "add":
        assert set(given) == {"a"} and -5 <= given["a"] <= 5
    else:
        assert name == "now" and given == {}


def test_a_required_call_is_made_whatever_the_model_would_say(client: openai.OpenAI) -> None:
    """20 chats run at once. Some of them may call several tools. `python -m testing.tool_chats` tries all families."""

    def one(seed: int) -> set[str]:
        many, heat = seed % 3 == 0, 0.5 + seed % 4 / 2
        options = {"parallel_tool_calls": many, "temperature": heat, "max_tokens": 600}
        choice = ask(client, tool_choice="required", seed=seed, **options).choices[0]
        assert choice.finish_reason == "tool_calls" or (many and choice.finish_reason == "length"), choice
        calls = choice.message.tool_calls
        assert choice.message.content is None and (len(calls) == 1 or many)
        for call in calls if choice.finish_reason == "tool_calls" else calls[:-1]:
            check(call.function.name, call.function.arguments)
        assert len({call.id for call in calls}) == len(calls)
        return {call.function.name for call in calls}

    with ThreadPoolExecutor(12) as pool:
        seen = set.union(*pool.map(one, range(20)))
    assert len(seen) > 1


def test_arguments_between_tags_match_their_schema_too() -> None:
    assert run_family("qwen3_coder", 12) == []


def test_a_named_function_is_called(client: openai.OpenAI) -> None:
    for name in ("get_weather", "add", "now"):
        named = {"type": "function", "function": {"name": name}}
        for seed in range(3):
            [call] = ask(client, tool_choice=named, seed=seed).choices[0].message.tool_calls
            assert call.function.name == name
            check(name, call.function.arguments)


def test_a_stream_brings_the_same_call(client: openai.OpenAI) -> None:
    for seed in range(4):
        options = {"tool_choice": "required", "seed": seed, "temperature": 1.0}
        [whole] = ask(client, **options).choices[0].message.tool_calls
        name, arguments, ends, ids = "", "", [], []
        for chunk in ask(client, stream=True, **options):
            for choice in chunk.choices:
                assert not choice.delta.content
                ends.append(choice.finish_reason)
                for part in choice.delta.tool_calls or ():
                    ids += [part.id] if part.id else []
                    name += part.function.name or ""
                    arguments += part.function.arguments
        assert (name, arguments) == (whole.function.name, whole.function.arguments)
        assert ends[-1] == "tool_calls" and len(ids) == 1


def test_responses_and_messages_enforce_calls_too(tools_llm: LLM, client: openai.OpenAI) -> None:
    flat: Any = [{"type": "function", **tool["function"]} for tool in (WEATHER, ADD)]
    options: Any = {"input": "How is Paris?", "model": "", "max_output_tokens": 600, "extra_body": {"seed": 3}}
    reply = client.responses.create(tools=flat, tool_choice="required", parallel_tool_calls=False, **options)
    [call] = reply.output
    assert call.type == "function_call"
    check(call.name, call.arguments)
    named = client.responses.create(tools=flat, tool_choice={"type": "function", "name": "add"}, **options)
    check("add", named.output[0].arguments)
    back = [*ASK, *named.output, {"type": "function_call_output", "call_id": named.output[0].call_id, "output": "4"}]
    assert client.responses.create(**options | {"input": back, "max_output_tokens": 8}, tools=flat).usage.input_tokens
    schema = WEATHER["function"]["parameters"]
    form: Any = {"format": {"type": "json_schema", "name": "w", "schema": schema}}
    check("get_weather", client.responses.create(text=form, **options).output_text)
    body = {"messages": ASK, "max_tokens": 600, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    own = [{"name": t["function"]["name"], "input_schema": t["function"]["parameters"]} for t in (WEATHER, ADD)]
    url = f"http://{tools_llm.addresses.http}/v1/messages"
    message = httpx.post(url, json=body | {"tools": own}, timeout=60).json()
    assert message["stop_reason"] == "tool_use"
    check(message["content"][0]["name"], json.dumps(message["content"][0]["input"]))
    config = {"format": {"type": "json_schema", "schema": schema}}
    told = httpx.post(url, json={"messages": ASK, "max_tokens": 600, "output_config": config}, timeout=60).json()
    check("get_weather", told["content"][0]["text"])


def test_a_strict_function_keeps_its_schema_if_the_model_chooses_to_call_it(
    tools_llm: LLM, client: openai.OpenAI
) -> None:
    """The bias makes the model begin a call. Calls in Llama's format do not begin with a marker."""
    strict = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in (WEATHER, ADD)]
    family = client.models.list().data[0].id
    if family == "llama3":
        with pytest.raises(openai.BadRequestError, match="cannot be strict with tool_choice auto"):
            ask(client, tools=strict)
        return
    ids = {"prompt": MARKS[family][0], "add_special_tokens": False}
    [mark] = httpx.post(f"http://{tools_llm.addresses.http}/tokenize", json=ids, timeout=30).json()["tokens"]
    for seed in range(4):
        reply = ask(client, tools=strict, logit_bias={str(mark): 100}, max_tokens=400, seed=seed, temperature=1.0)
        [call] = reply.choices[0].message.tool_calls
        check(call.function.name, call.function.arguments)


def test_many_samples_of_one_batch_each_call(client: openai.OpenAI) -> None:
    reply = ask(client, tool_choice="required", n=6, temperature=1.2, seed=3)
    calls = [choice.message.tool_calls[0] for choice in reply.choices]
    for call in calls:
        check(call.function.name, call.function.arguments)
    assert len({call.id for call in calls}) == 6


def test_a_conversation_with_a_call_goes_on(client: openai.OpenAI) -> None:
    message = ask(client, tool_choice="required").choices[0].message
    told = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sun"}
    reply = ask(client, messages=[*ASK, message, told], max_tokens=8, temperature=0.0)
    assert reply.usage.completion_tokens > 0 and reply.choices[0].finish_reason in ("length", "stop")


def test_a_free_answer_is_content(client: openai.OpenAI) -> None:
    plain = ask(client, tools=openai.NOT_GIVEN, parallel_tool_calls=openai.NOT_GIVEN, max_tokens=12, temperature=0.0)
    assert plain.choices[0].message.tool_calls is None
    free = ask(client, tool_choice="auto", max_tokens=12, temperature=0.0)
    pieces = [c.choices[0].delta.content or "" for c in ask(client, max_tokens=12, temperature=0.0, stream=True)]
    assert "".join(pieces) == (free.choices[0].message.content or "")


def test_a_schema_that_cannot_be_a_grammar_is_a_400(client: openai.OpenAI) -> None:
    bad = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": 5}}}
    with pytest.raises(openai.BadRequestError, match="tools"):
        ask(client, tools=[bad], tool_choice="required")


def test_the_example_runs(tools_llm: LLM) -> None:
    command = [sys.executable, str(ROOT / "examples" / "tools.py"), f"http://{tools_llm.addresses.http}/v1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "get_weather('" in done.stdout and "answer: " in done.stdout


def test_the_built_in_template_says_that_it_knows_no_tools(llm: LLM) -> None:
    body = {"messages": ASK, "tools": [NOW], "max_tokens": 1}
    reply = httpx.post(f"http://{llm.addresses.http}/v1/chat/completions", json=body, timeout=30)
    assert reply.status_code == 400 and "does not support tools" in reply.json()["error"]["message"]
