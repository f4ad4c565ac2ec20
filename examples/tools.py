"""Lets a model call a function, with the `openai` package: `python examples/tools.py [BASE_URL]`.

The server must have a model whose chat template supports tools (Qwen, Hermes, Llama 3, Mistral, ...). The template of
the built-in model does not support them.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from openai import OpenAI

WEATHER = {"Paris": "sunny, 21 degrees", "Oslo": "snow, -3 degrees"}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Returns the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": list(WEATHER)}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def main(base_url: str = "http://127.0.0.1:8000/v1") -> None:
    client = OpenAI(base_url=base_url, api_key="none")
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    asked = client.chat.completions.create(
        model=model, messages=messages, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, seed=7
    )
    messages.append(asked.choices[0].message)
    for call in asked.choices[0].message.tool_calls or ():
        assert call.type == "function"
        city = json.loads(call.function.arguments)["city"]
        print(f"{call.function.name}({city!r}) -> {WEATHER[city]}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": WEATHER[city]})
    answer = client.chat.completions.create(model=model, messages=messages, tools=[TOOL], max_tokens=64, seed=7)
    print(f"answer: {answer.choices[0].message.content}")


if __name__ == "__main__":
    main(*sys.argv[1:])
