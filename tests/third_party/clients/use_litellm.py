"""`litellm` as a library: the providers openai, hosted_vllm and text-completion-openai."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any, Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise it downloads its list of prices

import litellm
from pydantic import BaseModel, Field
from tried import MODEL, TOOLS_URL, URL, run, works

ASK = [{"role": "user", "content": "Tell me a story."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


litellm.suppress_debug_info = True


class Hero(BaseModel):
    name: str = Field(max_length=12)
    kind: Literal["fox", "wolf"]


def ask(provider: str = "openai", base: str = URL, **fields: Any) -> Any:
    options = {"messages": ASK, "max_tokens": 24, "temperature": 0, "api_key": "none", "num_retries": 0, **fields}
    return litellm.completion(model=f"{provider}/{MODEL}", api_base=f"{base}/v1", **options)


@works("completion, stream: openai, hosted_vllm")
def chats() -> None:
    for provider in ("openai", "hosted_vllm"):
        whole = ask(provider).choices[0].message.content
        parts = [chunk.choices[0].delta.content or "" for chunk in ask(provider, stream=True)]
        assert whole and "".join(parts) == whole


@works("text-completion-openai")
def text() -> None:
    reply = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", prompt="Once upon a time", api_base=f"{URL}/v1", api_key="none",
        max_tokens=8,
    )  # fmt: skip
    assert reply.choices[0].text


@works("acompletion, n=2, logprobs")
def asynchronous() -> None:
    options: dict[str, Any] = {"n": 2, "temperature": 1.0, "logprobs": True, "top_logprobs": 2, "max_tokens": 8}
    reply = asyncio.run(
        litellm.acompletion(model=f"openai/{MODEL}", api_base=f"{URL}/v1", api_key="none", messages=ASK, **options)
    )
    assert len(reply.choices) == 2 and len(reply.choices[1].logprobs.content[0].top_logprobs) == 2


@works(
    "an enforced call (also streamed), whose result is sent back",
    "tools also need the package mcp; hosted_vllm drops additionalProperties from schemas",
)
def tools() -> None:
    asked: Any = {"base": TOOLS_URL, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    message = ask(**asked, max_tokens=100).choices[0].message
    [call] = message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    chunks = list(ask(**asked, max_tokens=100, stream=True))
    whole = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls[0]
    assert whole.function.arguments == call.function.arguments
    told = {"role": "tool", "tool_call_id": call.id, "content": "sun"}
    assert ask(base=TOOLS_URL, messages=[*ASK, message, told], tools=[TOOL], max_tokens=8).usage


@works("response_format: a pydantic model")
def structured() -> None:
    reply = ask(response_format=Hero, max_tokens=100)
    assert Hero.model_validate_json(reply.choices[0].message.content)


@works("responses()")
def responses() -> None:
    reply = litellm.responses(
        model=f"openai/{MODEL}", input="Tell me a story.", api_base=f"{URL}/v1", api_key="none", max_output_tokens=16
    )
    assert reply.output[0].content[0].text


@works("anthropic provider, against /v1/messages")
def anthropic() -> None:
    reply = litellm.completion(
        model=f"anthropic/{MODEL}", messages=ASK, api_base=URL, api_key="none", max_tokens=16, temperature=0
    )
    assert reply.choices[0].message.content


@works("errors: BadRequestError, NotFoundError")
def errors() -> None:
    for fields, kind in (({"temperature": -1}, litellm.BadRequestError), ({"max_tokens": 10**6}, Exception)):
        try:
            ask(**fields)
        except kind:
            continue
        raise AssertionError(f"{fields} was taken")


@works("anthropic provider with tools: an enforced call")
def anthropic_tools() -> None:
    reply = litellm.completion(
        model=f"anthropic/{MODEL}", messages=ASK, api_base=TOOLS_URL, api_key="none", max_tokens=100, temperature=0,
        tools=[TOOL], tool_choice="required",
    )  # fmt: skip
    call = reply.choices[0].message.tool_calls[0]
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")


@works("embedding(): openai, hosted_vllm")
def embeddings() -> None:
    for provider in ("openai", "hosted_vllm"):
        reply = litellm.embedding(
            model=f"{provider}/{MODEL}", input=["wolf", "fox"], api_base=f"{URL}/v1", api_key="none"
        )
        assert len(reply.data) == 2 and len(reply.data[0]["embedding"]) > 8


run()
