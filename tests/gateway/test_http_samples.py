"""OpenAI's HTTP API with several samples per prompt and with beam searches: choices, streams, usage."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from gateway.api.openai_reply import LogprobFormat
from testing.gateway.parts import Fault, Script, beam_score, expected_ids
from tests.gateway.http_served import Served, serve

__all__ = ["serve"]
PROMPTS = ["the mill", "the wind"]


def text_of(served: Served, prompt: str, count: int, sample: int) -> str:
    tokenizer = served.rig.assets.tokenizer
    return str(tokenizer.decode(expected_ids(tokenizer.encode(prompt).ids, count, sample)))


def texts_of(served: Served, count: int, samples: int) -> list[str]:
    """Returns the expected text of each choice, in order."""
    return [text_of(served, prompt, count, sample) for prompt in PROMPTS for sample in range(samples)]


async def test_each_prompt_has_n_choices_and_counts_once(serve: Any) -> None:
    served = await serve()
    reply = (await served.post("/v1/completions", prompt=PROMPTS, max_tokens=6, n=3, logprobs=1)).json()
    assert [c["index"] for c in reply["choices"]] == list(range(6))
    assert [c["text"] for c in reply["choices"]] == texts_of(served, 6, 3)
    assert all(len(c["logprobs"]["tokens"]) == 6 and "beam_score" not in c for c in reply["choices"])
    num_prompt = sum(len(served.rig.assets.tokenizer.encode(p).ids) for p in PROMPTS)
    assert reply["usage"]["prompt_tokens"] == reply["looseleaf"]["handed_over_tokens"] == num_prompt
    assert reply["usage"]["completion_tokens"] == 36 and reply["looseleaf"]["attempts"] == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_the_choices_of_a_prompt_share_its_echo(
    serve: Any, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """It takes 50 us per token of the prompt in the event loop."""
    echoed, calls = LogprobFormat.echoed, []
    monkeypatch.setattr(LogprobFormat, "echoed", lambda self, *args: calls.append(args) or echoed(self, *args))
    served = await serve()
    asked = {"prompt": PROMPTS, "max_tokens": 2, "n": 3, "echo": True, "logprobs": 1, "stream": stream}
    reply = await served.post("/v1/completions", **asked)
    assert reply.status_code == 200 and len(calls) == 2
    if not stream:
        choices = reply.json()["choices"]
        assert [c["logprobs"]["tokens"][0] for c in choices] == ["<s>"] * 6
        assert [len(c["logprobs"]["tokens"]) for c in choices] == [
            len(served.rig.assets.tokenizer.encode(prompt).ids) + 2 for prompt in PROMPTS for _ in range(3)
        ]


async def test_the_choices_of_a_prompt_share_its_log_probabilities(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    maps, calls = LogprobFormat._prompt_maps, []
    monkeypatch.setattr(LogprobFormat, "_prompt_maps", lambda self, *args: calls.append(args) or maps(self, *args))
    served = await serve()
    prompts = [list(range(20, 150)), [20, 21]]
    asked = {"prompt": prompts, "max_tokens": 2, "n": 3, "prompt_logprobs": 1, "return_token_ids": True}
    choices = (await served.post("/v1/completions", **asked)).json()["choices"]
    assert len(calls) == 4, "three pieces and one"
    for number, choice in enumerate(choices):
        prompt = prompts[number // 3]
        [first, *others] = choice["prompt_logprobs"]
        assert choice["index"] == number and first is None and len(choice["token_ids"]) == 2
        assert all(str(token) in entry for token, entry in zip(prompt[1:], others, strict=True))


@pytest.mark.parametrize(("fields", "param"), [
    ({"prompt_logprobs": 20}, "prompt_logprobs"), ({"echo": True, "logprobs": 20}, "logprobs"),
])  # fmt: skip
async def test_log_probabilities_of_prompts_that_would_be_repeated_too_often_are_refused(
    serve: Any, fields: dict[str, Any], param: str
) -> None:
    served = await serve()
    reply = await served.post("/v1/completions", prompt=[[20] * 400] * 64, n=8, max_tokens=1, **fields)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param
    assert f"{param} 20, n 8 and 25600 prompt tokens make 4300800 log-prob" in reply.json()["error"]["message"]


@pytest.mark.parametrize("include_usage", [False, True])
async def test_a_stream_mixes_the_samples_of_several_prompts(serve: Any, include_usage: bool) -> None:
    served = await serve(Script(submits=[Fault("die", 3)]), num_decode=2)
    chunks = await served.events(
        "/v1/completions", prompt=PROMPTS, max_tokens=12, n=3, stream_options={"include_usage": include_usage}
    )
    choices = [c["choices"][0] for c in chunks if c["choices"]]
    for index, text in enumerate(texts_of(served, 12, 3)):
        mine = [c for c in choices if c["index"] == index]
        assert "".join(c["text"] for c in mine) == text
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["length"]
    assert [i for i, c in enumerate(chunks) if "looseleaf" in c] == [len(chunks) - 1]
    assert chunks[-1]["looseleaf"]["attempts"] >= 3
    if include_usage:
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 72


async def test_echo_shows_the_prompt_in_every_choice(serve: Any) -> None:
    served = await serve()
    body = {"prompt": PROMPTS[0], "max_tokens": 3, "n": 2, "echo": True, "logprobs": 0}
    whole = (await served.post("/v1/completions", **body)).json()["choices"]
    assert [c["text"] for c in whole] == [PROMPTS[0] + text_of(served, PROMPTS[0], 3, sample) for sample in (0, 1)]
    chunks = [c["choices"][0] for c in await served.events("/v1/completions", **body)]
    for index in (0, 1):
        mine = [c for c in chunks if c["index"] == index]
        assert "".join(c["text"] for c in mine) == whole[index]["text"]
        tokens = [t for c in mine for t in (c["logprobs"] or {"tokens": []})["tokens"]]
        assert tokens == whole[index]["logprobs"]["tokens"]
        assert whole[index]["logprobs"]["token_logprobs"][:2] == [None, -0.5]


async def test_chat_streams_open_every_choice_with_its_role(serve: Any) -> None:
    served = await serve()
    client = openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": "hi"}]
    whole = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, n=2)
    stream = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, n=2, stream=True)
    chunks = [c.choices[0] async for c in stream]
    for index in (0, 1):
        mine = [c for c in chunks if c.index == index]
        assert [c.delta.role for c in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert "".join(c.delta.content or "" for c in mine) == whole.choices[index].message.content
    assert whole.choices[0].message.content != whole.choices[1].message.content
    await client.close()


async def test_a_beam_search_brings_scores_whole_and_streamed(serve: Any) -> None:
    served = await serve()
    body = {"prompt": PROMPTS, "max_tokens": 6, "use_beam_search": True, "best_of": 4, "n": 2, "temperature": 0}
    whole = (await served.post("/v1/completions", **body)).json()
    assert [c["text"] for c in whole["choices"]] == texts_of(served, 6, 2)
    assert [c["beam_score"] for c in whole["choices"]] == [beam_score(0), beam_score(1)] * 2
    assert whole["usage"]["completion_tokens"] == 24
    chunks = [c["choices"][0] for c in await served.events("/v1/completions", **body)]
    ends = {c["index"]: c["beam_score"] for c in chunks if c["finish_reason"]}
    assert ends == {index: beam_score(index % 2) for index in range(4)}
