"""Structured output through real services with the built-in model: every kind, both protocols, samples, refusals."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from common.errors import InvalidArgument
from looseleaf import LLM, AsyncClient, StructuredOutput
from testing.system import assert_nothing_held, wait_for

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["brave", "old", "small"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
LARK = 'start: "<" word ("," word){1,3} ">"\nword: /[a-z]{1,8}/'
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(num_blocks=2048, roles="split") as running:
        yield running
        assert_nothing_held(running.addresses.block_store)


@pytest.fixture(scope="module")
def client(llm: LLM) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{llm.addresses.http}/v1", api_key="none", max_retries=0)


def post(llm: LLM, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"http://{llm.addresses.http}/v1/completions", json={"prompt": PROMPT, **body}, timeout=60)


def texts(llm: LLM, **body: Any) -> list[str]:
    """Returns the texts of a completion. Checks that every sample ended without reaching a limit."""
    reply = post(llm, {"max_tokens": 300, **body})
    assert reply.status_code == 200, reply.text
    choices = reply.json()["choices"]
    assert {choice["finish_reason"] for choice in choices} == {"stop"}, choices
    return [choice["text"] for choice in choices]


def check_schema(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)


def check_lark(text: str) -> None:
    assert re.fullmatch(r"<[a-z]{1,8}(,[a-z]{1,8}){1,3}>", text), text


def check_regex(text: str) -> None:
    assert re.fullmatch(r"[a-z]{3,5}-[0-9]{4}", text), text


def check_choice(text: str) -> None:
    assert text in ("the wolf", "the fox", "the fo"), text


FORMAT = {"type": "json_schema", "json_schema": {"name": "hero", "strict": True, "schema": SCHEMA}}
KINDS: dict[str, tuple[dict[str, Any], Any]] = {
    "response_format": ({"response_format": FORMAT}, check_schema),
    "guided_json": ({"guided_json": SCHEMA}, check_schema),
    "guided_json as text": ({"guided_json": json.dumps(SCHEMA)}, check_schema),
    "structured_outputs.json": ({"structured_outputs": {"json": SCHEMA}}, check_schema),
    "guided_regex": ({"guided_regex": "[a-z]{3,5}-[0-9]{4}"}, check_regex),
    "structured_outputs.regex": ({"structured_outputs": {"regex": "[a-z]{3,5}-[0-9]{4}"}}, check_regex),
    "guided_choice": ({"guided_choice": ["the wolf", "the fox", "the fo"]}, check_choice),
    "guided_grammar": ({"guided_grammar": LARK}, check_lark),
    "structured_outputs.grammar": ({"structured_outputs": {"grammar": LARK}}, check_lark),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", [{"temperature": 0}, {"temperature": 1.0, "seed": 3, "n": 4, "top_p": 0.9}], ids=str)
def test_every_kind_over_http(llm: LLM, kind: str, how: dict[str, Any]) -> None:
    fields, check = KINDS[kind]
    found = texts(llm, **fields, **how)
    for text in found:
        check(text)
    assert len(found) == how.get("n", 1)
    assert texts(llm, **fields, **how) == found, "the same again, from the cache"


def test_any_object(llm: LLM) -> None:
    """The built-in model would tell a story in its first string, so a bias makes it end strings and objects."""
    ends = {str(llm.client.tokenize(text)[-1]): bias for text, bias in (('"', 8), ("}", 12))}
    for seed in range(6):
        how = {"temperature": 1.0, "seed": seed, "logit_bias": ends}
        [text] = texts(llm, response_format={"type": "json_object"}, **how)
        assert isinstance(json.loads(text), dict)


GRPC = {
    "schema": (StructuredOutput("json_schema", json.dumps(SCHEMA)), check_schema),
    "regex": (StructuredOutput("regex", "[a-z]{3,5}-[0-9]{4}"), check_regex),
    "choice": (StructuredOutput("choice", options=("the wolf", "the fox", "the fo")), check_choice),
    "lark": (StructuredOutput("lark", LARK), check_lark),
}


@pytest.mark.parametrize("kind", GRPC)
def test_every_kind_over_grpc(llm: LLM, kind: str) -> None:
    wanted, check = GRPC[kind]
    done = llm.client.generate(PROMPT, structured_output=wanted, n=4, temperature=1.0, seed=3, max_tokens=300)
    for sample in done.samples:
        check(sample.text)
    streamed = "".join(
        delta.text
        for delta in llm.client.generate(
            PROMPT, structured_output=wanted, temperature=1.0, seed=3, max_tokens=300, stream=True
        )
    )
    assert streamed == done.samples[0].text
    assert llm.client.generate(PROMPT, structured_output=StructuredOutput("json_object"), max_tokens=2).text[0] == "{"


def test_openai_client_chat_and_stream(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    asked: dict[str, Any] = {
        "model": model, "messages": [{"role": "user", "content": "Tell me of a hero"}], "response_format": FORMAT,
        "temperature": 0, "max_tokens": 300,
    }  # fmt: skip
    whole = client.chat.completions.create(**asked).choices[0]
    check_schema(whole.message.content or "")
    assert whole.finish_reason == "stop"
    parts = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**asked, stream=True)]
    assert "".join(parts) == whole.message.content and len(parts) > 5


def test_neighbours_get_what_they_get_alone(llm: LLM) -> None:
    """Free and constrained requests run in one batch."""
    bodies = [KINDS[kind][0] for kind in ("guided_json", "guided_regex", "guided_grammar")] + [{}, {"n": 3}]
    bodies = [{**body, "temperature": 0.8, "seed": 5, "max_tokens": 60, "logprobs": 2} for body in bodies]

    def strip(reply: httpx.Response) -> Any:
        return [(c["text"], c["logprobs"], c["finish_reason"]) for c in reply.json()["choices"]]

    async def together() -> list[Any]:
        async with httpx.AsyncClient(base_url=f"http://{llm.addresses.http}", timeout=60) as http:
            calls = [http.post("/v1/completions", json={"prompt": PROMPT, **body}) for body in bodies * 3]
            return [strip(reply) for reply in await asyncio.gather(*calls)]

    alone = [strip(post(llm, body)) for body in bodies]
    assert asyncio.run(together()) == alone * 3


def test_the_end_of_the_grammar_is_a_stop_without_a_reason(llm: LLM) -> None:
    [choice] = post(llm, {"guided_choice": ["yes"], "temperature": 0}).json()["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("yes", "stop", None)


def test_one_token(llm: LLM) -> None:
    """The first token, which prefill samples, is also constrained. It may be the last one."""
    assert texts(llm, guided_regex="[0-9]", temperature=1.0, n=8, seed=1) != ["0"] * 8
    for text in texts(llm, guided_regex="[0-9]", temperature=1.0, n=8, seed=1):
        assert text in "0123456789"


def test_stop_strings_and_max_tokens_cut_the_output(llm: LLM) -> None:
    [text] = texts(llm, guided_regex="(ab)+c", temperature=0, stop=["ba"])
    assert text == "a"
    [choice] = post(llm, {"guided_regex": "a{50}", "max_tokens": 3, "temperature": 0}).json()["choices"]
    assert choice["finish_reason"] == "length" and set(choice["text"]) == {"a"}


def test_min_tokens_delays_the_end(llm: LLM) -> None:
    reply = post(llm, {"guided_regex": "[a-z]*", "min_tokens": 12, "max_tokens": 40, "temperature": 1.0, "seed": 2})
    assert reply.json()["usage"]["completion_tokens"] >= 12
    assert texts(llm, guided_choice=["no"], min_tokens=12) == ["no"], "where the grammar ends, nothing can follow"


def test_bias_chooses_among_what_is_allowed(llm: LLM) -> None:
    [one], [two] = ([llm.client.tokenize(text)[-1]] for text in ("1", "2"))
    assert texts(llm, guided_choice=["1", "2"], logit_bias={str(one): 100}, temperature=0) == ["1"]
    assert texts(llm, guided_choice=["1", "2"], logit_bias={str(two): 100}, temperature=0) == ["2"]
    assert texts(llm, guided_choice=["1"], logit_bias={str(one): -100, str(two): 100}) == ["1"]


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_regex": "((("}, "guided_regex", "unclosed group"),
    ({"guided_regex": ""}, "guided_regex", "empty"),
    ({"guided_regex": "a" * 70_000}, "guided_regex", "65536"),
    ({"guided_choice": []}, "guided_choice", "at least 1"),
    ({"guided_choice": ["a", ""]}, "guided_choice[1]", "empty"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar", "nothing"),
    ({"guided_json": '{"type": '}, "guided_json", "EOF"),
    ({"guided_json": {"not": {"type": "null"}}}, "guided_json", "not"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "given"),
    ({"response_format": {"type": "yaml"}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}},
     "response_format.json_schema.schema", "objekt"),
    ({"structured_outputs": {"xml": 1}}, "structured_outputs.xml", "not a known field"),
    ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs.regex", "cannot be combined"),
    ({"guided_regex": "a", "use_beam_search": True, "n": 2}, "guided_regex", "beam search"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "guided_regex"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "field", "says"), REFUSED, ids=lambda value: str(value)[:50])
def test_refused(llm: LLM, body: dict[str, Any], field: str, says: str) -> None:
    reply = post(llm, body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == field and says in error["message"], error
    assert error["message"].isprintable()


def test_refused_over_grpc(llm: LLM) -> None:
    for wanted in (StructuredOutput("regex", "((("), StructuredOutput("choice"), StructuredOutput("lark", "start: x")):
        with pytest.raises(InvalidArgument) as caught:
            llm.client.generate(PROMPT, structured_output=wanted)
        assert caught.value.violations[0].field == "structured_output"


async def test_hostile_grammars_disturb_nobody(llm: LLM) -> None:
    """A stream continues without a long pause, while each hostile grammar gets a 400 within a second or two. Two times,
    the machine may pause.
    """
    from tests.gateway.test_grammar_trial import HOSTILE

    names = {"lark": "guided_grammar", "regex": "guided_regex", "json_schema": "guided_json"}
    pauses, took = list[float](), list[float]()

    async def stream(client: AsyncClient) -> None:
        last = time.monotonic()
        async for _ in client.stream(PROMPT, max_tokens=400, ignore_eos=True, temperature=0.0):
            pauses.append(time.monotonic() - last)
            last = time.monotonic()

    async with AsyncClient(llm.addresses.grpc) as client, httpx.AsyncClient(timeout=60) as http:
        streaming = asyncio.create_task(stream(client))
        for wanted in HOSTILE.values():
            began = time.monotonic()
            body = {"prompt": PROMPT, names[wanted.kind]: wanted.source}
            reply = await http.post(f"http://{llm.addresses.http}/v1/completions", json=body)
            assert reply.status_code == 400, reply.text
            took.append(time.monotonic() - began)
        await streaming
    assert sorted(took)[-3] < 2.0 and sorted(pauses)[-3] < 1.0
    assert texts(llm, guided_choice=["still here"]) == ["still here"]


def test_workers_killed_midway_cost_no_token(llm: LLM) -> None:
    """Decode dies while constrained samples run. The new grammar states follow the tokens so far."""
    items = {"type": "string", "minLength": 5, "maxLength": 30}
    schema = {"type": "array", "items": items, "minItems": 12, "maxItems": 14}
    wanted = StructuredOutput("json_schema", json.dumps(schema))
    how: dict[str, Any] = {"structured_output": wanted, "n": 4, "temperature": 1.0, "seed": 9, "max_tokens": 700}
    expected = llm.client.generate(PROMPT, **how)
    for name in ("decode", "prefill"):
        pid, killed, tokens = llm.pids[name], False, dict[int, list[int]]()
        for delta in llm.client.generate(PROMPT, **how, stream=True, cache_salt=name):
            tokens.setdefault(delta.index, []).extend(delta.token_ids)
            if not killed and len(tokens.get(0, ())) >= 20:
                killed = True
                os.kill(pid, signal.SIGKILL)
        assert killed and tokens == {i: list(s.token_ids) for i, s in enumerate(expected.samples)}
        wait_for(lambda n=name: llm.pids[n], lambda now, old=pid: now != old, 60, "not started again")  # type: ignore[misc]
    for sample in expected.samples:
        jsonschema.validate(json.loads(sample.text), schema)
