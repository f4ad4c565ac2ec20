"""curl and the openai client: completions and chats, streamed and not streamed."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import httpx
import openai
import pytest

from looseleaf import LLM


@pytest.fixture(scope="module")
def client(llm: LLM) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{llm.addresses.http}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    [only] = client.models.list().data
    return only.id


def curl(llm: LLM, path: str, body: dict[str, Any], *flags: str) -> str:
    command = ["curl", "-sN", f"http://{llm.addresses.http}{path}", *flags]
    return subprocess.run([*command, "-d", json.dumps(body)], check=True, capture_output=True, text=True).stdout


OPTIONS: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


def test_completion_streams_the_same_text(client: openai.OpenAI, model: str) -> None:
    whole = client.completions.create(model=model, prompt="Once upon a time", **OPTIONS)
    assert whole.usage is not None and whole.usage.completion_tokens <= 12
    stream = client.completions.create(
        model=model, prompt="Once upon a time", stream=True, stream_options={"include_usage": True}, **OPTIONS
    )
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason


def test_chat_streams_the_same_text(client: openai.OpenAI, model: str) -> None:
    messages: Any = [{"role": "user", "content": "Tell me a story"}]
    whole = client.chat.completions.create(model=model, messages=messages, **OPTIONS)
    chunks = list(client.chat.completions.create(model=model, messages=messages, stream=True, **OPTIONS))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == (whole.choices[0].message.content or "")


@pytest.mark.parametrize("prompt", ["a", ["a", "b"], [11, 12, 13], [[11, 12], [13]]], ids=str)
def test_every_form_of_prompt(client: openai.OpenAI, model: str, prompt: Any) -> None:
    reply = client.completions.create(model=model, prompt=prompt, **OPTIONS)
    many = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    assert [choice.index for choice in reply.choices] == list(range(many))


def test_cached_tokens_show_in_the_usage(client: openai.OpenAI, model: str) -> None:
    prompt = [20 + i % 40 for i in range(70)]
    for cached in (0, 64):
        usage = client.completions.create(model=model, prompt=prompt, **OPTIONS).usage
        assert usage is not None
        details = usage.prompt_tokens_details
        assert (details.cached_tokens if details else 0) == cached


def test_logprobs_and_echo(client: openai.OpenAI, model: str) -> None:
    reply = client.completions.create(model=model, prompt=[11, 12, 13], logprobs=2, echo=True, **OPTIONS)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None
    assert reply.usage is not None
    assert len(logprobs.token_logprobs) == 3 + reply.usage.completion_tokens
    assert logprobs.token_logprobs[0] is None
    assert all(p is not None and p <= 0 for p in logprobs.token_logprobs[1:])


def test_curl(llm: LLM, model: str) -> None:
    whole = json.loads(curl(llm, "/v1/completions", {"model": model, "prompt": "hello", **OPTIONS}))
    assert whole["choices"][0]["finish_reason"] in ("length", "stop")
    phases = whole["looseleaf"]
    assert phases["prompt_tokens_computed"] + phases["prompt_tokens_cached"] == whole["usage"]["prompt_tokens"]
    lines = curl(llm, "/v1/completions", {"model": model, "prompt": "hello", "stream": True, **OPTIONS}).split("\n\n")
    assert lines[-2] == "data: [DONE]"
    deltas = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    text = "".join(choice["text"] for delta in deltas for choice in delta["choices"])
    assert text == whole["choices"][0]["text"]


def test_a_stop_string_never_leaks(llm: LLM, model: str) -> None:
    body = {"model": model, "prompt": "hello", **OPTIONS, "max_tokens": 40}
    text = json.loads(curl(llm, "/v1/completions", body))["choices"][0]["text"]
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    stopped = json.loads(curl(llm, "/v1/completions", {**body, "stop": [stop]}))["choices"][0]
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == text[: text.index(stop)]
    lines = curl(llm, "/v1/completions", {**body, "stop": [stop], "stream": True}).split("\n\n")[:-2]
    deltas = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert "".join(c["text"] for p in deltas for c in p["choices"]) == stopped["text"]


def test_tokenize_round_trip_health_and_metrics(llm: LLM, model: str) -> None:
    base = f"http://{llm.addresses.http}"
    tokens = httpx.post(f"{base}/tokenize", json={"model": model, "prompt": "héllo wörld"}, timeout=60).json()["tokens"]
    assert llm.client.detokenize(tokens) == "héllo wörld"
    assert httpx.get(f"{base}/health", timeout=60).status_code == 200
    metrics = httpx.get(f"{base}/metrics", timeout=60).text
    for name in (
        "looseleaf_time_to_first_token_seconds",
        "vllm:time_to_first_token_seconds",
        "vllm:num_requests_running",
    ):
        assert f"\n{name}" in metrics, name
