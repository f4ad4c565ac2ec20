"""`langchain-openai`."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field
from tried import MODEL, TOOLS_URL, URL, run, works

OPTIONS: dict[str, Any] = {"model": MODEL, "api_key": "none", "max_retries": 0, "temperature": 0}
chat = ChatOpenAI(base_url=f"{URL}/v1", max_tokens=24, **OPTIONS)
agent = ChatOpenAI(base_url=f"{TOOLS_URL}/v1", max_tokens=100, **OPTIONS)
ASK = [SystemMessage("Be brief."), HumanMessage("Tell me a story.")]


class Hero(BaseModel):
    """The hero of a story."""

    name: str = Field(max_length=12)
    kind: Literal["fox", "wolf"]


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Returns the weather of a city."""
    return f"sun in {city}"


@works("invoke with usage")
def invoke() -> None:
    message = chat.invoke(ASK)
    assert message.content and message.usage_metadata["output_tokens"] > 0


@works("stream with usage")
def stream() -> None:
    whole, chunks = chat.invoke(ASK), list(chat.stream(ASK, stream_usage=True))
    assert "".join(str(chunk.content) for chunk in chunks) == whole.content
    assert sum(c.usage_metadata["output_tokens"] for c in chunks if c.usage_metadata) > 0


@works("batch, ainvoke, astream")
def at_once() -> None:
    async def both() -> tuple[Any, list[Any]]:
        return await chat.ainvoke(ASK), [chunk async for chunk in chat.astream(ASK)]

    first, second = chat.batch([ASK, ASK])
    message, chunks = asyncio.run(both())
    assert first.content == second.content == message.content == "".join(str(chunk.content) for chunk in chunks)


@works("logprobs, n=2")
def logprobs() -> None:
    message = chat.bind(logprobs=True, top_logprobs=2).invoke(ASK)
    assert len(message.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2
    assert len(chat.generate([ASK], n=2, temperature=1.0).generations[0]) == 2


@works("OpenAI: completions, batch of prompts")
def completions() -> None:
    model = OpenAI(base_url=f"{URL}/v1", max_tokens=8, **OPTIONS)
    assert all(model.batch(["Once upon a time", "The wolf"]))


@works("bind_tools: an enforced call, which is run and whose result is sent back")
def tools() -> None:
    message = agent.bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False, strict=True).invoke(ASK)
    [call] = message.tool_calls
    told = get_weather.invoke(call)
    assert isinstance(told, ToolMessage) and told.content.startswith("sun in ")
    assert agent.bind_tools([get_weather]).invoke([*ASK, message, told]).response_metadata["finish_reason"]


@works("streamed call")
def streamed_call() -> None:
    whole: Any = None
    for chunk in agent.bind_tools([get_weather], tool_choice="get_weather").stream(ASK):
        whole = chunk if whole is None else whole + chunk
    assert whole.tool_calls[0]["args"]["city"] in ("Paris", "Rome")


@works(
    "with_structured_output: json_schema, function_calling", "json_mode allows any object: the model chooses the fields"
)
def structured() -> None:
    for method in ("json_schema", "function_calling"):
        assert isinstance(agent.with_structured_output(Hero, method=method, strict=True).invoke(ASK), Hero)


@works("Responses API (use_responses_api)")
def responses() -> None:
    model = ChatOpenAI(base_url=f"{URL}/v1", max_tokens=24, use_responses_api=True, **OPTIONS)
    assert model.invoke(ASK).text == chat.invoke(ASK).content


@works(
    "OpenAIEmbeddings: a query, documents",
    "OpenAIEmbeddings needs check_embedding_ctx_length=False, because otherwise it sends token ids of tiktoken, and "
    "chunk_size=64",
)
def embeddings() -> None:
    model = OpenAIEmbeddings(
        base_url=f"{URL}/v1", api_key="none", model=MODEL, check_embedding_ctx_length=False, chunk_size=64
    )
    documents = model.embed_documents(["wolf", "fox"] * 40)
    assert len(documents) == 80 and documents[0] == documents[2] == model.embed_query("wolf")


@works("Responses API with tools: an enforced call, whose result is sent back")
def responses_tools() -> None:
    model = ChatOpenAI(base_url=f"{TOOLS_URL}/v1", max_tokens=100, use_responses_api=True, **OPTIONS)
    message = model.bind_tools([get_weather], tool_choice="get_weather", strict=True).invoke(ASK)
    [call] = message.tool_calls
    told = get_weather.invoke(call)
    assert model.bind_tools([get_weather]).invoke([*ASK, message, told]).usage_metadata


run()
