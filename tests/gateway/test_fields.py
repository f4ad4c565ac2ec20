"""Fields without effect, unknown fields, and vLLM's fields that change the prompt or the form of the answer."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from common.errors import InvalidArgument, Unimplemented
from common.types import FinishReason
from gateway.api.body_fields import unsupported_of
from gateway.api.http_options import HttpOptions
from gateway.api.openai_parse import parse_body
from gateway.api.openai_request import ChatBody, CompletionBody, SamplingBody
from gateway.api.responses_request import ResponsesBody
from gateway.api.unknown_fields import MAX_LOGGED
from gateway.api.vllm_fields import UNSUPPORTED
from gateway.intake.limits import MAX_FIELD_BYTES, PromptLimits
from gateway.request.detokenize import Detokenizers
from gateway.request.outlet import Outlet
from gateway.request.sample import Sample
from testing.gateway.parts import BOS_ID, EOS_ID, expected_ids
from tests.gateway.http_served import serve as serve  # a fixture
from tests.gateway.test_detokenize import BYTE_FALLBACK, BYTE_LEVEL

LIMITS = PromptLimits(text_bytes=1 << 16, fitting_bytes=4096, max_model_len=512)
RIGHT: dict[Any, dict[str, Any]] = {
    CompletionBody: {"prompt": "x"},
    ChatBody: {"messages": [{"role": "user", "content": "x"}]},
    ResponsesBody: {"input": "x"},
}


def parse(kind: Any, content: dict[str, Any], unknown: list[str] | None = None) -> Any:
    raw = json.dumps({**RIGHT[kind], **content}).encode()
    return parse_body(kind, raw, LIMITS, None if unknown is None else unknown.append)


@pytest.mark.parametrize("kind", RIGHT)
def test_a_field_that_asks_for_nothing_is_accepted(kind: Any) -> None:
    for name, nothing in {**UNSUPPORTED, **kind.unsupported}.items():
        for value in (nothing, None):
            assert parse(kind, {name: value}).all_wanted()


@pytest.mark.parametrize("kind", RIGHT)
def test_a_field_that_asks_for_something_unsupported_is_refused_and_named(kind: Any) -> None:
    for name in unsupported_of(kind):
        with pytest.raises(Unimplemented, match=f"{name} is not supported") as caught:
            parse(kind, {name: {"x": [1]}}, [])
        assert caught.value.violations[0].field == name


@pytest.mark.parametrize("kind", RIGHT)
def test_a_field_that_nobody_knows_is_named_or_refused(kind: Any) -> None:
    unknown: list[str] = []
    body = parse(kind, {"oops": {"a": [1]}, "x-y": 1, "temperature": 0.5, "user": "me"}, unknown)
    assert unknown == ["oops", "x-y"] and body.temperature == 0.5
    with pytest.raises(InvalidArgument, match="oops is not a known field"):
        parse(kind, {"oops": 1})


def test_unknown_fields_are_limited_in_size_and_do_not_hide_what_is_wrong() -> None:
    with pytest.raises(InvalidArgument, match=f"more than {MAX_FIELD_BYTES} bytes"):
        parse(CompletionBody, {"oops": "x" * MAX_FIELD_BYTES}, [])
    twice = b'{"prompt": "x", "a": 1, ' + b'"user": "' + b"u" * MAX_FIELD_BYTES + b'", "user": 1}'
    with pytest.raises(InvalidArgument, match="bytes"):
        parse_body(CompletionBody, twice, LIMITS, [].append)
    with pytest.raises(InvalidArgument, match="n is invalid"):
        parse(CompletionBody, {"oops": 1, "n": "many"}, [])
    long_prompt: list[str] = []
    assert parse(CompletionBody, {"prompt": "m" * 60_000, "oops": 1}, long_prompt) and long_prompt == ["oops"]


def test_a_supported_field_takes_precedence_over_the_table_of_unsupported_ones() -> None:
    class Grown(SamplingBody, kw_only=True):
        suffix: str | None = None

    assert parse_body(Grown, b'{"suffix": "x"}', LIMITS).suffix == "x"


@pytest.mark.parametrize(
    ("content", "name", "value"),
    [
        ({"max_tokens": 2.0}, "max_tokens", 2),
        ({"seed": -3e0}, "seed", -3),
        ({"stop_token_ids": [5.0, 6]}, "stop_token_ids", [5, 6]),
    ],
)
def test_integral_floats_are_integers(content: dict[str, Any], name: str, value: Any) -> None:
    assert getattr(parse(CompletionBody, content), name) == value


@pytest.mark.parametrize("prompt", [[11.0, 12], [[11.0], [12.0]]])
def test_integral_floats_are_token_ids(prompt: Any) -> None:
    ids = [token for item in parse(CompletionBody, {"prompt": prompt}).prompt for token in item.ids]
    assert ids == [11, 12] and all(type(token) is int for token in ids)


@pytest.mark.parametrize("content", [{"max_tokens": 2.5}, {"max_tokens": 1e300}, {"prompt": [1.5]}, {"n": "2.0"}])
def test_other_floats_are_not(content: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse(CompletionBody, content)
    assert caught.value.violations[0].field == next(iter(content))


async def test_the_client_is_warned_of_unknown_fields_and_the_log_has_each_once(
    serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    served = await serve()
    caplog.set_level(logging.WARNING, "http")
    for stream in (False, True, False):
        reply = await served.post("/v1/completions", prompt="the mill", max_tokens=2, stream=stream, frob=1)
        assert reply.status_code == 200
        assert reply.headers["x-looseleaf-warning"] == "fields that are not known were ignored: frob"
    assert [r.message for r in caplog.records if "frob" in r.message] == [
        "field 'frob' is not known and was ignored (--strict-fields refuses it)"
    ]
    reply = await served.post("/v1/completions", prompt="x", max_tokens=1)
    assert "x-looseleaf-warning" not in reply.headers
    many = {f"f{i}\r\né": i for i in range(3 * MAX_LOGGED)}
    reply = await served.post("/v1/completions", prompt="x", max_tokens=1, **many)
    assert reply.status_code == 200 and "\n" not in reply.headers["x-looseleaf-warning"]
    for part in range(40):
        await served.post("/v1/completions", prompt="x", max_tokens=1, **{f"g{part}-{i}": 1 for i in range(8)})
    assert len([r for r in caplog.records if "is not known" in r.message]) == MAX_LOGGED


async def test_strict_fields_refuses_them(serve: Any) -> None:
    served = await serve(http=HttpOptions(strict_fields=True))
    reply = await served.post("/v1/completions", prompt="the mill", max_tokens=2, frob=1)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "frob"


async def test_a_field_that_is_not_supported_is_named_as_param(serve: Any) -> None:
    served = await serve()
    for field in ({"suffix": "end"}, {"documents": [{}]}, {"structural_tag": "{}"}):
        error = (await served.post("/v1/completions", prompt="x", **field)).json()["error"]
        assert error["param"] == next(iter(field)) and error["code"] == "unimplemented"


async def test_continuous_usage_stats_are_in_every_chunk(serve: Any) -> None:
    served = await serve()
    options = {"include_usage": True, "continuous_usage_stats": True}
    messages = [{"role": "user", "content": "the old"}]
    for path, body in (("completions", {"prompt": "the old"}), ("chat/completions", {"messages": messages})):
        chunks = await served.events(f"/v1/{path}", **body, max_tokens=30, n=2, stream_options=options)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts) and counts[-1] == 60 and 0 < counts[0] < 60 and len(set(counts)) > 5
        assert len({chunk["usage"]["prompt_tokens"] for chunk in chunks}) == 1
        assert all(
            u["total_tokens"] == u["prompt_tokens"] + u["completion_tokens"] for u in [c["usage"] for c in chunks]
        )
        alone = await served.events(
            f"/v1/{path}", **body, max_tokens=4, stream_options={"continuous_usage_stats": True}
        )
        assert all("usage" not in chunk for chunk in alone), "as vLLM: it needs include_usage"


@pytest.mark.parametrize("skip", [True, False, None])
async def test_special_tokens_are_shown_if_they_are_not_to_be_skipped(serve: Any, skip: bool | None) -> None:
    served = await serve()
    rig, ids = served.rig, [40, EOS_ID, 41]
    tokenizer = rig.assets.tokenizer
    for kind in RIGHT:
        [wanted] = parse(kind, {"skip_special_tokens": skip, "ignore_eos": True}).all_wanted()
        sample = Sample(await rig.validator.resolve(wanted), Detokenizers(tokenizer))
        outlet = Outlet(lambda deltas: None)
        sample.accept(outlet, 0, ids, (), FinishReason.LENGTH)
        [delta] = outlet.pending
        assert delta.text == tokenizer.decode(ids, skip_special_tokens=skip is not False)
        assert ("</s>" in delta.text) is (skip is False)


@pytest.mark.parametrize("skip", [True, False])
def test_detokenizers_of_every_kind_know_what_to_skip(skip: bool) -> None:
    for tokenizer, ids in ((BYTE_LEVEL, [BOS_ID, 40, EOS_ID, 41]), (BYTE_FALLBACK, [1, 260, 2, 261])):
        detokenizer = Detokenizers(tokenizer).begin(skip_special=skip)
        text = "".join(detokenizer.add(token) for token in ids) + detokenizer.flush()
        assert text == tokenizer.decode(ids, skip_special_tokens=skip) and ("</s>" in text) is not skip


async def test_token_ids_are_returned_on_request(serve: Any) -> None:
    served = await serve()
    prompt_ids = served.rig.assets.tokenizer.encode("the mill").ids
    ids = expected_ids(prompt_ids, 9)
    body = {"prompt": "the mill", "max_tokens": 9, "return_token_ids": True}
    [choice] = (await served.post("/v1/completions", **body)).json()["choices"]
    assert choice["token_ids"] == ids and choice["prompt_token_ids"] == prompt_ids
    chunks = [c["choices"][0] for c in await served.events("/v1/completions", **body)]
    assert [token for c in chunks for token in c.get("token_ids", ())] == ids
    assert [c["prompt_token_ids"] for c in chunks if "prompt_token_ids" in c] == [prompt_ids]
    messages = [{"role": "user", "content": "hi"}]
    chat = {"messages": messages, "max_tokens": 5, "return_token_ids": True}
    whole = (await served.post("/v1/chat/completions", **chat)).json()
    streamed = [c["choices"][0] for c in await served.events("/v1/chat/completions", **chat)]
    assert whole["choices"][0]["token_ids"] == [t for c in streamed for t in c.get("token_ids", ())]
    assert whole["prompt_token_ids"] == streamed[0]["prompt_token_ids"] and len(whole["prompt_token_ids"]) > 3
    plain = (await served.post("/v1/completions", prompt="x", max_tokens=1)).json()["choices"][0]
    assert "token_ids" not in plain


async def test_a_prompt_is_truncated_from_its_beginning(serve: Any) -> None:
    served = await serve()
    ids = list(range(10, 60))
    body = {"prompt": ids, "max_tokens": 6, "return_token_ids": True}
    [choice] = (await served.post("/v1/completions", **body, truncate_prompt_tokens=8)).json()["choices"]
    assert choice["prompt_token_ids"] == ids[-8:] and choice["token_ids"] == expected_ids(ids[-8:], 6)
    text = "the old mill " * 300
    [choice] = (await served.post("/v1/completions", **{**body, "prompt": text}, truncate_prompt_tokens=-1)).json()[
        "choices"
    ]
    whole = served.rig.assets.tokenizer.encode(text).ids
    assert len(whole) > 512 and choice["prompt_token_ids"] == whole[-506:]
    for wrong in (0, -2, 513):
        reply = await served.post("/v1/completions", **body, truncate_prompt_tokens=wrong)
        assert reply.json()["error"]["param"] == "truncate_prompt_tokens"


async def test_openais_own_codes_name_the_field(serve: Any) -> None:
    served = await serve(api_key="s3cret")
    reply = await served.post("/v1/completions", prompt="x")
    assert reply.status_code == 401
    assert (reply.json()["error"]["code"], reply.json()["error"]["type"]) == (
        "invalid_api_key",
        "invalid_request_error",
    )
    served.client.headers["authorization"] = "Bearer s3cret"
    for path in ("/v1/completions", "/tokenize"):
        reply = await served.post(path, prompt="x", model="other")
        assert reply.status_code == 404
        assert (reply.json()["error"]["code"], reply.json()["error"]["param"]) == ("model_not_found", "model")
    reply = await served.client.get("/v1/models/other")
    assert reply.status_code == 404 and reply.json()["error"]["code"] == "model_not_found"
    for prompt in ("mill " * 2000, "m" * 70_000, [5] * 512, [5] * 600):
        error = (await served.post("/v1/completions", prompt=prompt)).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt"), error
    error = (await served.post("/v1/completions", prompt="x", max_tokens=511)).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
