"""`llama-index-llms-openai-like`. It reads the annotations of tools, so they are not postponed here."""

import asyncio
from typing import Any, Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field
from tried import MODEL, TOOLS_URL, URL, run, works

OPTIONS: dict[str, Any] = {
    "model": MODEL, "api_key": "none", "max_retries": 0, "temperature": 0, "context_window": 1024,
}  # fmt: skip
chat = OpenAILike(api_base=f"{URL}/v1", is_chat_model=True, max_tokens=24, **OPTIONS)
text = OpenAILike(api_base=f"{URL}/v1", is_chat_model=False, max_tokens=24, **OPTIONS)
agent = OpenAILike(
    api_base=f"{TOOLS_URL}/v1", is_chat_model=True, is_function_calling_model=True, max_tokens=100, **OPTIONS
)
ASK = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Tell me a story.")]


class Hero(BaseModel):
    """The hero of a story."""

    name: str = Field(max_length=12)
    kind: Literal["fox", "wolf"]


def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Returns the weather of a city."""
    return f"sun in {city}"


@works("complete, stream_complete")
def complete() -> None:
    whole = text.complete("Once upon a time").text
    assert whole and "".join(part.delta for part in text.stream_complete("Once upon a time")) == whole


@works("chat, stream_chat")
def one_chat() -> None:
    whole = chat.chat(ASK).message.content
    assert whole and "".join(part.delta or "" for part in chat.stream_chat(ASK)) == whole


@works("achat, astream_chat")
def asynchronous() -> None:
    async def both() -> tuple[Any, list[Any]]:
        return await chat.achat(ASK), [part async for part in await chat.astream_chat(ASK)]

    whole, parts = asyncio.run(both())
    assert whole.message.content == "".join(part.delta or "" for part in parts)


@works("chat_with_tools: an enforced call, whose result is sent back")
def tools() -> None:
    tool = FunctionTool.from_defaults(get_weather)
    reply = agent.chat_with_tools([tool], chat_history=ASK, tool_required=True)
    calls = agent.get_tool_calls_from_response(reply)
    assert calls[0].tool_name == "get_weather" and calls[0].tool_kwargs["city"] in ("Paris", "Rome")
    told = [ChatMessage(role="tool", content="sun", additional_kwargs={"tool_call_id": call.tool_id}) for call in calls]
    assert agent.chat_with_tools([tool], chat_history=[*ASK, reply.message, *told]).message


@works("as_structured_llm with a call")
def structured() -> None:
    assert isinstance(agent.as_structured_llm(Hero).chat(ASK).raw, Hero)


@works("as_structured_llm with a JSON schema (should_use_structured_outputs)")
def schema() -> None:
    model = OpenAILike(
        api_base=f"{URL}/v1", is_chat_model=True, max_tokens=100, should_use_structured_outputs=True, **OPTIONS
    )
    assert isinstance(model.as_structured_llm(Hero).chat(ASK).raw, Hero)


run()
