"""Holds a conversation of two turns with the `openai` package: `python examples/chat.py [BASE_URL]`.

The second turn's prompt repeats the first turn, whose full blocks the server can find in its prefix cache.
"""

from __future__ import annotations

import sys

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam


def main(base_url: str = "http://127.0.0.1:8000/v1") -> None:
    client = OpenAI(base_url=base_url, api_key="none")
    model = client.models.list().data[0].id
    messages: list[ChatCompletionMessageParam] = []
    for question in ("Tell me a story about a wolf who is afraid of the dark.", "Tell me another one."):
        messages.append({"role": "user", "content": question})
        reply = client.chat.completions.create(model=model, messages=messages, max_tokens=64, seed=7)
        answer = reply.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": answer})
        assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
        cached = reply.usage.prompt_tokens_details.cached_tokens
        print(f"> {question}\n{answer}\n[{reply.usage.prompt_tokens} prompt tokens, {cached} cached]\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
