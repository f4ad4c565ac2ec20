"""OpenAI's Responses API and Anthropic's Messages API, with real workers and the vendors' own clients."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from looseleaf import LLM

SAMPLING: dict[str, Any] = {"temperature": 0}


@pytest.fixture(scope="module")
def client(llm: LLM) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{llm.addresses.http}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def chat_text(client: openai.OpenAI) -> str:
    """Returns the chat's answer to "hi". All three APIs must give the same answer."""
    messages: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    model = client.models.list().data[0].id
    reply = client.chat.completions.create(model=model, messages=messages, max_tokens=16, **SAMPLING)
    return reply.choices[0].message.content or ""


def test_responses_say_the_same_whole_and_streamed(client: openai.OpenAI, chat_text: str) -> None:
    asked: Any = {"model": client.models.list().data[0].id, "instructions": "be brief", "input": "hi"}
    whole = client.responses.create(**asked, max_output_tokens=16, **SAMPLING)
    with client.responses.stream(**asked, max_output_tokens=16, **SAMPLING) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert whole.output_text == text == chat_text and len(text) > 5
    assert whole.usage is not None and 0 < whole.usage.output_tokens <= 16


def test_the_second_turn_finds_the_first_in_the_cache(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    first = client.responses.create(model=model, input="tell me a tale " * 8, max_output_tokens=20, **SAMPLING)
    items: Any = [{"role": "user", "content": "tell me a tale " * 8}, *(item.model_dump() for item in first.output)]
    again: Any = [*items, {"role": "user", "content": "more"}]
    second = client.responses.create(model=model, input=again, max_output_tokens=4, **SAMPLING)
    assert second.usage is not None and second.usage.input_tokens_details.cached_tokens > 16


def test_messages_say_the_same(llm: LLM, chat_text: str) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=f"http://{llm.addresses.http}", api_key="none", max_retries=0)
    model = llm.client.models()[0].id
    asked: Any = {"model": model, "system": "be brief", "messages": [{"role": "user", "content": "hi"}]}
    whole = client.messages.create(**asked, max_tokens=16, extra_body=SAMPLING)
    with client.messages.stream(**asked, max_tokens=16, extra_body=SAMPLING) as stream:
        text = "".join(stream.text_stream)
    assert whole.content[0].text == text == chat_text


def test_special_tokens_show_where_they_are_drawn(llm: LLM) -> None:
    """A bias makes the model produce its end token. With ignore_eos, it continues."""
    options: Any = {"max_tokens": 4, "ignore_eos": True, "logit_bias": {2: 100.0}, "temperature": 0.0}
    hidden = llm.client.generate([11, 12, 13], **options)
    shown = llm.client.generate([11, 12, 13], **options, skip_special_tokens=False)
    assert list(hidden.token_ids) == list(shown.token_ids) == [2] * 4
    assert hidden.text == "" and len(shown.text) >= 4
    cut = llm.client.generate([11, 12, 13], max_tokens=4, temperature=0.0, truncate_prompt_tokens=2)
    assert cut.usage.prompt_tokens == 2


def test_bad_words_and_allowed_tokens_hold(llm: LLM) -> None:
    asked: Any = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    free = llm.client.generate("tell me a tale", **asked)
    word = llm.client.detokenize(free.token_ids[4:6])
    banned = llm.client.generate("tell me a tale", **asked, bad_words=[word])
    assert word in free.text and banned.token_ids[:5] == free.token_ids[:5] and banned.token_ids != free.token_ids
    few = llm.client.generate("tell me a tale", **asked, allowed_token_ids=[65, 66, 67], n=3, seed=1)
    assert all(set(sample.token_ids) <= {65, 66, 67} for sample in few.samples)
