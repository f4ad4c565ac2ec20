"""The `openai` package: completions, chats, tools, structured output, responses, errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import openai
from pydantic import BaseModel, Field
from tried import MODEL, TOOLS_URL, URL, refused, run, works

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
agent = openai.OpenAI(base_url=f"{TOOLS_URL}/v1", api_key="none", max_retries=0)
ASK: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me a story."}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Returns the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Hero(BaseModel):
    name: str = Field(max_length=12)
    kind: Literal["fox", "wolf"]
    age: int = Field(ge=0, le=99)


def chat(**fields: Any) -> Any:
    return client.chat.completions.create(**{"model": MODEL, "messages": ASK, "max_tokens": 24, **fields})


def tell(**fields: Any) -> Any:
    return client.completions.create(**{"model": MODEL, "prompt": "Once upon a time", "max_tokens": 16, **fields})


def call(**fields: Any) -> Any:
    return agent.chat.completions.create(
        **{"model": MODEL, "messages": ASK, "tools": [WEATHER], "tool_choice": "required",
           "parallel_tool_calls": False, **fields}
    )  # fmt: skip


@works("models")
def models() -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


@works("completion: one text, several texts, token ids")
def completion() -> None:
    for prompt, many in (("a", 1), (["a", "b"], 2), ([11, 12], 1), ([[11, 12], [13]], 2)):
        assert len(tell(prompt=prompt).choices) == many


@works("completion stream")
def completion_stream() -> None:
    text = "".join(chunk.choices[0].text for chunk in tell(stream=True, temperature=0))
    assert text == tell(temperature=0).choices[0].text != ""


@works("echo, logprobs")
def echo() -> None:
    reply = tell(echo=True, logprobs=3, max_tokens=4)
    assert reply.choices[0].text.startswith("Once upon a time")
    logprobs = reply.choices[0].logprobs
    assert logprobs.token_logprobs[0] is None and len(logprobs.tokens) == reply.usage.total_tokens
    assert all(3 <= len(top) <= 4 for top in logprobs.top_logprobs[1:])


@works("chat")
def one_chat() -> None:
    reply = chat()
    assert reply.choices[0].message.role == "assistant" and reply.choices[0].message.content
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


@works("chat stream with usage")
def chat_stream() -> None:
    chunks = list(chat(stream=True, temperature=0, stream_options={"include_usage": True}))
    whole = chat(temperature=0)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.total_tokens == whole.usage.total_tokens


@works("stream helper")
def stream_helper() -> None:
    with client.chat.completions.stream(model=MODEL, messages=ASK, stop=["."]) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
    assert text == stream.get_final_completion().choices[0].message.content


@works("n=2, seed")
def samples() -> None:
    first, again = (chat(n=2, seed=7, temperature=1.0) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in again.choices] and texts[0] != texts[1]


@works("stop")
def stop() -> None:
    reply = chat(stop=[" "], temperature=0)
    assert " " not in reply.choices[0].message.content and reply.choices[0].finish_reason == "stop"


@works("chat logprobs")
def logprobs() -> None:
    reply = chat(logprobs=True, top_logprobs=5, max_tokens=4)
    tokens = reply.choices[0].logprobs.content
    assert len(tokens) == 4 and all(len(token.top_logprobs) == 5 for token in tokens)


@works("logit_bias, penalties, developer role, text parts")
def fields() -> None:
    parts: Any = [{"type": "text", "text": "Tell me"}, {"type": "text", "text": " a story."}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    assert chat(messages=messages, logit_bias={"40": 5}, presence_penalty=0.5, frequency_penalty=0.5, user="me")


@works("16 async chats at once")
def many_at_once() -> None:
    async def ask() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0) as many:
            calls = [many.chat.completions.create(model=MODEL, messages=ASK, max_tokens=8) for _ in range(16)]
            return await asyncio.gather(*calls)

    assert all(reply.choices[0].message.content for reply in asyncio.run(ask()))


@works("an enforced call, whose result is sent back")
def tools() -> None:
    message = call().choices[0].message
    [made] = message.tool_calls
    assert made.function.name == "get_weather" and json.loads(made.function.arguments)["city"] in ("Paris", "Rome")
    told: Any = {"role": "tool", "tool_call_id": made.id, "content": "sun"}
    reply = call(messages=[*ASK, message, told], tool_choice="auto", max_tokens=8)
    assert reply.choices[0].finish_reason in ("stop", "length")


@works("streamed call of a named function")
def streamed_call() -> None:
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    deltas = [d for c in call(tool_choice=named, stream=True) for d in c.choices[0].delta.tool_calls or ()]
    assert deltas[0].function.name == "get_weather"
    assert json.loads("".join(delta.function.arguments or "" for delta in deltas))["city"] in ("Paris", "Rome")


@works("parse() into a pydantic model, strict JSON schema")
def parse() -> None:
    reply = client.chat.completions.parse(model=MODEL, messages=ASK, response_format=Hero, max_tokens=200)
    assert isinstance(reply.choices[0].message.parsed, Hero)


@works("json_object; vLLM's structured_outputs through extra_body")
def structured() -> None:
    reply = chat(response_format={"type": "json_object"}, max_tokens=8)
    assert reply.choices[0].message.content.startswith("{")
    reply = chat(extra_body={"structured_outputs": {"choice": ["fox", "wolf"]}})
    assert reply.choices[0].message.content in ("fox", "wolf")


@works("responses, complete and streamed")
def responses() -> None:
    asked: Any = {"model": MODEL, "input": "Tell me a story.", "max_output_tokens": 16, "temperature": 0}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == whole.output_text != ""


@works("errors: BadRequestError with param, NotFoundError, request id")
def errors() -> None:
    for fields, param in (({"temperature": -1}, "temperature"), ({"max_tokens": 10**6}, "max_tokens")):
        try:
            chat(**fields)
        except openai.BadRequestError as error:
            assert error.param == param and error.request_id, (error.param, error.request_id)
        else:
            raise AssertionError(f"{param} was taken")
    try:
        chat(model="another")
    except openai.NotFoundError as error:
        assert error.code == "model_not_found"
    else:
        raise AssertionError("the model was taken")
    assert chat()._request_id


@works("tools in responses: an enforced call (also streamed), whose result is sent back; text_format")
def responses_tools() -> None:
    tool: Any = {"type": "function", "strict": True, **WEATHER["function"]}
    asked: Any = {"model": MODEL, "tools": [tool], "temperature": 0}
    forced: Any = {"tool_choice": "required", "parallel_tool_calls": False}
    reply = agent.responses.create(**asked, **forced, input="Tell me a story.")
    [made] = reply.output
    assert json.loads(made.arguments)["city"] in ("Paris", "Rome")
    with agent.responses.stream(**asked, **forced, input="Tell me a story.") as stream:
        pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == made.arguments
    told: Any = {"type": "function_call_output", "call_id": made.call_id, "output": "sun"}
    history: Any = [{"role": "user", "content": "Tell me a story."}, *reply.output, told]
    assert agent.responses.create(**asked, input=history, max_output_tokens=8).usage
    parsed = client.responses.parse(model=MODEL, input="A hero.", text_format=Hero, max_output_tokens=200)
    assert isinstance(parsed.output_parsed, Hero)


@works("embeddings: texts, base64, dimensions")
def embeddings() -> None:
    reply = client.embeddings.create(model=MODEL, input=["wolf", "fox"])
    vectors = [item.embedding for item in reply.data]
    assert len(vectors) == 2 and all(abs(sum(x * x for x in vector) - 1) < 1e-5 for vector in vectors)
    [cut] = client.embeddings.create(model=MODEL, input="wolf", dimensions=8, encoding_format="float").data
    assert len(cut.embedding) == 8 and cut.embedding[0] * vectors[0][0] > 0


@refused("images", "image_url")
def images() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    chat(messages=[{"role": "user", "content": [part]}])


@refused("tools with the built-in model, whose template does not support them", "tools")
def no_tools() -> None:
    chat(tools=[WEATHER])


run()
