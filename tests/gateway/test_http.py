"""OpenAI's HTTP API over a real socket: response formats, streams, errors, clients that disconnect."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import openai
import pytest

from gateway.intake.limits import MAX_BODY_BYTES
from gateway.intake.tokenizing import TokenizerPool
from protos.v1 import decode_pb2 as pb
from testing.gateway.parts import Fault, Script, expected_ids
from tests.gateway.http_served import serve as serve  # a fixture
from tests.gateway.test_requests import until


async def test_a_completion_has_openais_shape_and_our_account(serve: Any) -> None:
    served = await serve()
    reply = (await served.post("/v1/completions", model="tiny", prompt="the mill", max_tokens=10)).json()
    assert reply["object"] == "text_completion" and reply["model"] == "tiny"
    assert reply["choices"] == [
        {
            "index": 0,
            "text": served.text_of("the mill", 10),
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    num_prompt = len(served.rig.assets.tokenizer.encode("the mill").ids)
    assert reply["usage"] == {
        "prompt_tokens": num_prompt, "completion_tokens": 10, "total_tokens": num_prompt + 10,
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    account = reply["looseleaf"]
    assert account["prompt_tokens_computed"] == account["handed_over_tokens"] == num_prompt and account["attempts"] == 1
    assert account["times_ms"]["decode"] == 4.0 and account["times_ms"]["prefill"] == 2.0


async def test_a_stream_brings_the_same_text_then_usage_then_done(serve: Any) -> None:
    served = await serve()
    chunks = await served.events(
        "/v1/completions", prompt="the old", max_tokens=40, stream_options={"include_usage": True}
    )
    texts = [c["choices"][0]["text"] for c in chunks if c["choices"]]
    assert "".join(texts) == served.text_of("the old", 40) and len(texts) > 5
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]][-1] == "length"
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 40
    assert chunks[-1]["looseleaf"]["attempts"] == 1 and all(c["usage"] is None for c in chunks[:-1])
    plain = await served.events("/v1/completions", prompt="the old", max_tokens=4)
    assert "usage" not in plain[-1] and plain[-1]["looseleaf"]["handed_over_tokens"] > 0


async def test_every_token_is_part_of_the_stream(serve: Any) -> None:
    served = await serve(Script(step_s=0.01))
    chunks = await served.events("/v1/completions", prompt="the old", max_tokens=20, n=2)
    for index in range(2):
        ids = expected_ids(served.rig.assets.tokenizer.encode("the old").ids, 20, index)
        mine = [c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(mine) == served.rig.assets.tokenizer.decode(ids)
    messages = [{"role": "user", "content": "the old"}]
    chunks = await served.events("/v1/chat/completions", messages=messages, max_tokens=20)
    whole = (await served.post("/v1/chat/completions", messages=messages, max_tokens=20)).json()
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
    assert text == whole["choices"][0]["message"]["content"]


async def test_several_prompts_of_every_kind_are_answered_in_order(serve: Any) -> None:
    served = await serve()
    prompts = ["the mill", "the wind", "was not"]
    ids = [served.rig.assets.tokenizer.encode(p).ids for p in prompts]
    for prompt in (prompts, ids):
        reply = (await served.post("/v1/completions", prompt=prompt, max_tokens=6)).json()
        assert [c["text"] for c in reply["choices"]] == [served.text_of(p, 6) for p in prompts]
        assert reply["usage"]["completion_tokens"] == 18 and reply["looseleaf"]["attempts"] == 3
        chunks = await served.events("/v1/completions", prompt=prompt, max_tokens=6)
        for index, text in enumerate(prompts):
            mine = [c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == index]
            assert "".join(mine) == served.text_of(text, 6)
        assert sum("looseleaf" in c for c in chunks) == 1
    one = (await served.post("/v1/completions", prompt=ids[0], max_tokens=6)).json()
    assert len(one["choices"]) == 1 and one["choices"][0]["text"] == served.text_of("the mill", 6)


async def test_chat_with_the_openai_client_whole_and_streamed(serve: Any) -> None:
    served = await serve()
    client = openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "hi "}, {"type": "text", "text": "there"}]}]
    whole = await client.chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=8, logprobs=True, top_logprobs=1, user="me"
    )
    choice = whole.choices[0]
    tokenizer = served.rig.assets.tokenizer
    prompt_ids = tokenizer.encode("<user>hi there\n<assistant>", add_special_tokens=False).ids
    assert (
        choice.message.content == tokenizer.decode(expected_ids(prompt_ids, 8)) and choice.message.role == "assistant"
    )
    assert choice.logprobs is not None and choice.logprobs.content is not None and len(choice.logprobs.content) == 8
    raw = b"".join(bytes(item.bytes or []) for item in choice.logprobs.content)
    assert raw.decode(errors="replace") == choice.message.content
    stream = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, stream=True)
    chunks = [chunk async for chunk in stream]
    assert chunks[0].object == "chat.completion.chunk" and chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == choice.message.content
    models = await client.models.list()
    assert models.data[0].id == "tiny" and (await client.models.retrieve("tiny")).id == "tiny"
    await client.close()


async def test_echo_and_log_probabilities(serve: Any) -> None:
    served = await serve()
    body = {"prompt": "the mill", "max_tokens": 3, "echo": True, "logprobs": 2}
    choice = (await served.post("/v1/completions", **body)).json()["choices"][0]
    ids = served.rig.assets.tokenizer.encode("the mill").ids
    found = choice["logprobs"]
    assert choice["text"] == "the mill" + served.text_of("the mill", 3)
    assert {len(found[name]) for name in found} == {len(ids) + 3}
    assert found["token_logprobs"] == [None] + [-0.5] * (len(ids) + 2) and found["text_offset"][len(ids)] == len(
        "the mill"
    )
    chunks = await served.events("/v1/completions", **body)
    assert "".join(c["choices"][0]["text"] for c in chunks) == choice["text"]
    joined = [t for c in chunks for t in (c["choices"][0]["logprobs"] or {"tokens": []})["tokens"]]
    assert joined == found["tokens"]
    scored = (await served.post("/v1/completions", **{**body, "max_tokens": 0})).json()
    assert scored["choices"][0]["text"] == "the mill" and scored["usage"]["completion_tokens"] == 0
    assert scored["choices"][0]["logprobs"]["tokens"] == found["tokens"][: len(ids)]
    extra = (await served.post("/v1/completions", prompt="the mill", max_tokens=1, prompt_logprobs=1)).json()
    assert extra["choices"][0]["prompt_logprobs"][1][str(ids[1])]["logprob"] == -0.5


@pytest.mark.parametrize(("logprobs", "prompt_logprobs"), [(2, 1), (1, 2), (0, 2)])
async def test_an_echo_and_the_prompts_log_probabilities_have_their_own_numbers(
    serve: Any, logprobs: int, prompt_logprobs: int
) -> None:
    served = await serve()
    asked = {"prompt": "the mill", "max_tokens": 1}
    echo, prompt = {"echo": True, "logprobs": logprobs}, {"prompt_logprobs": prompt_logprobs}
    [of_echo, of_prompt, of_both] = [
        (await served.post("/v1/completions", **asked, **more)).json()["choices"][0]
        for more in (echo, prompt, {**echo, **prompt})
    ]
    assert of_both["logprobs"] == of_echo["logprobs"]
    assert of_both["prompt_logprobs"] == of_prompt["prompt_logprobs"]
    assert len(of_prompt["prompt_logprobs"][1]) >= prompt_logprobs


BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"prompt": "x", "temperature": "hot"}, "temperature"),
    ({"prompt": "x", "max_tokens": True}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 10**30}, "max_tokens"),
    ({"prompt": "x", "temperature": 10**400}, "temperature"),
    ({"prompt": "x", "seed": 10**400}, "seed"),
    ({"prompt": "x", "stop": [1]}, "stop[0]"),
    ({"prompt": "x", "stop": ["a", ""]}, "stop[1]"),
    ({"prompt": "x", "logit_bias": {"x": 1}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"9999": 1}}, "logit_bias"),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "x", "stream": True, "stream_options": {"oops": 1}}, "stream_options.oops"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [[1], ["a"]]}, "prompt"),
    ({"prompt": ["a"] * 65}, "prompt"),
    ({"prompt": [[1], [99999]]}, "prompt[1][0]"),
    ({"prompt": [True, False]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({}, "prompt"),
]


@pytest.mark.parametrize(("body", "param"), BAD)
async def test_a_bad_field_is_named_with_status_400(serve: Any, body: dict[str, Any], param: str) -> None:
    served = await serve()
    reply = await served.post("/v1/completions", **body)
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == param and error["message"].startswith(param), error
    assert error["type"] == "invalid_request_error" and error["code"] == "invalid_argument"


async def test_what_is_known_and_not_supported_is_refused_as_such(serve: Any) -> None:
    served = await serve()
    for field in ({"suffix": "x"}, {"tools": [1]}):
        error = (await served.post("/v1/completions", prompt="x", **field)).json()["error"]
        assert error["code"] == "unimplemented" and error["message"].startswith(next(iter(field)))
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    for field in ({"functions": [{"name": "f"}]}, {"audio": {"voice": "x"}}):
        assert (await served.post("/v1/chat/completions", **chat, **field)).json()["error"]["code"] == "unimplemented"
    quiet = {"n": 1, "tools": [], "response_format": {"type": "text"}, "store": True, "metadata": {}, "user": "u"}
    assert (await served.post("/v1/chat/completions", **chat, **quiet)).status_code == 200
    image = [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}]
    reply = await served.post("/v1/chat/completions", messages=image)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "messages[0].content[0]"
    assert (await served.post("/v1/chat/completions", messages=[])).json()["error"]["param"] == "messages"
    assert (await served.post("/v1/chat/completions")).json()["error"]["param"] == "messages"


@pytest.mark.parametrize(
    "raw",
    [b"{bad", b"[1]", b"\xff\xfe{}", b"", b"[" * 100_000, b'{"prompt": "\\ud800"}', b'{"prompt":"x","top_p":NaN}'],
)
async def test_bad_json_is_a_status_too(serve: Any, raw: bytes) -> None:
    served = await serve()
    reply = await served.client.post("/v1/completions", content=raw)
    assert reply.status_code == 400 and reply.json()["error"]["code"] == "invalid_argument"


async def test_other_errors_have_their_statuses(serve: Any) -> None:
    served = await serve(max_queue=3)
    assert (await served.post("/v1/completions", prompt="x", model="other")).status_code == 404
    assert (await served.client.get("/nowhere")).status_code == 404
    assert (await served.client.get("/v1/completions")).status_code == 405
    for name in ("other", "%0A"):
        assert (await served.client.get(f"/v1/models/{name}")).status_code == 404
    too_wide = await served.post("/v1/completions", prompt=["a", "b", "c", "d"])
    assert too_wide.status_code == 400 and too_wide.json()["error"]["param"] == "prompt"
    assert (await served.post("/v1/embeddings", input=["a"] * 4)).json()["error"]["param"] == "input"
    with served.rig.admission.enter():
        too_many = await served.post("/v1/completions", prompt=["a", "b", "c"])
        streamed = await served.post("/v1/completions", prompt=["a", "b", "c"], stream=True)
    assert too_many.status_code == 429 and int(too_many.headers["retry-after"]) >= 1
    assert too_many.json()["error"]["type"] == "rate_limit_error"
    assert streamed.status_code == 429, "a stream that is refused before its first event has its own status"
    large = await served.client.post("/v1/completions", content=b"x" * (MAX_BODY_BYTES + 1))
    assert large.status_code == 413
    assert served.rig.admission.current == 0
    assert served.rig.metric('looseleaf_requests_failed_total{code="RESOURCE_EXHAUSTED"') == 2


async def test_an_api_key_is_required_where_one_is_set(serve: Any) -> None:
    served = await serve(api_key="s3cret")
    body = {"prompt": "x", "max_tokens": 1}
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic s3cret"}):
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            assert (await served.client.post(path, json=body, headers=headers)).status_code == 401
        assert (await served.client.get("/v1/models", headers=headers)).status_code == 401
    good = {"authorization": "Bearer s3cret"}
    assert (await served.client.post("/v1/completions", json=body, headers=good)).status_code == 200
    assert (await served.client.get("/health")).status_code == 200
    assert served.rig.script.prefilled[0].cache_salt != b"", "tenants have their own salt"


async def test_tokenize_detokenize_health_and_metrics(serve: Any) -> None:
    served = await serve()
    reply = (await served.post("/tokenize", prompt="the mill")).json()
    ids = served.rig.assets.tokenizer.encode("the mill").ids
    assert reply == {"count": len(ids), "max_model_len": 512, "tokens": ids}
    assert (await served.post("/tokenize", prompt="the mill", add_special_tokens=False)).json()["tokens"] == ids[1:]
    chat = (await served.post("/tokenize", messages=[{"role": "user", "content": "x"}])).json()["tokens"]
    assert served.rig.assets.tokenizer.decode(chat) == "<user>x\n<assistant>"
    assert (await served.post("/detokenize", tokens=ids)).json() == {"prompt": "the mill"}
    assert (await served.post("/detokenize", tokens=[9999])).status_code == 400
    assert (await served.post("/tokenize")).status_code == 400
    await served.post("/v1/completions", prompt="the", max_tokens=5)
    text = (await served.client.get("/metrics")).text
    for name in (
        "vllm:time_to_first_token_seconds_count", "vllm:inter_token_latency_seconds_bucket",
        "vllm:num_requests_running", "vllm:request_success_total",
        "looseleaf_hand_overs_total", "looseleaf_time_to_first_token_seconds_sum",
    ):  # fmt: skip
        assert f"\n{name}{{" in text and 'model_name="tiny"' in text
    assert 'vllm:inter_token_latency_seconds_count{model_name="tiny"} 4.0' in text
    assert (await served.client.get("/health")).json() == {"status": "ready"}
    served.rig.workers.on_records = lambda records: None
    served.rig.workers._router.update([], 0.0)
    assert (await served.client.get("/health")).status_code == 503


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_cancels_its_request(serve: Any, stream: bool) -> None:
    served = await serve(Script(step_s=0.02))
    reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rsplit(":", 1)[1]))
    body = json.dumps({"prompt": "the", "max_tokens": 400, "stream": stream}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    await until(lambda: served.rig.script.submitted)
    if stream:
        assert b"200 OK" in await reader.readuntil(b"\r\n")
    writer.close()
    await until(lambda: served.rig.script.cancelled == [1])
    await until(lambda: served.rig.admission.current == 0)


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/tokenize", {"prompt": "mill " * 1000}),
        ("/detokenize", {"tokens": [5] * 5000}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "mill " * 1000}]}),
    ],
)
async def test_a_client_that_goes_away_leaves_no_work_for_the_tokenizer(
    serve: Any, monkeypatch: pytest.MonkeyPatch, path: str, asked: dict[str, Any]
) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def in_thread(self: TokenizerPool, work: object) -> None:
        begun.set()
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()

    served = await serve()
    monkeypatch.setattr(TokenizerPool, "in_thread", in_thread)
    _, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rsplit(":", 1)[1]))
    body = json.dumps({"model": "tiny", "max_tokens": 5, **asked} if "messages" in path else asked).encode()
    writer.write(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (path.encode(), len(body)) + body)
    await asyncio.wait_for(begun.wait(), 60)
    writer.close()
    await asyncio.wait_for(ended.wait(), 60)


async def test_a_failure_in_mid_stream_is_an_error_event(serve: Any) -> None:
    served = await serve(Script(submits=[Fault("reject", 3, pb.REJECTION_TOO_LARGE)]))
    chunks = await served.events("/v1/completions", prompt="the", max_tokens=20)
    assert chunks[-1]["error"]["code"] == "invalid_argument" and len(chunks) > 1


async def test_a_lost_worker_is_only_a_pause_in_the_stream(serve: Any) -> None:
    served = await serve(Script(submits=[Fault("die", 5)]))
    chunks = await served.events("/v1/completions", prompt="the old", max_tokens=30)
    assert "".join(c["choices"][0]["text"] for c in chunks) == served.text_of("the old", 30)
    assert chunks[-1]["looseleaf"]["attempts"] == 2


async def test_line_separators_and_quotes_survive_a_stream(serve: Any) -> None:
    served = await serve()
    text = 'a "quoted" \u2028 \u2029 \x85 \\ line\r\n \U0001f600'
    chunks = await served.events("/v1/completions", prompt=text, max_tokens=1, echo=True)
    assert chunks[0]["choices"][0]["text"] == text


async def test_an_answer_on_a_kept_connection_does_not_wait_for_an_acknowledgement(serve: Any) -> None:
    served = await serve()
    times = []
    for _ in range(31):
        start = time.perf_counter()
        assert (await served.client.get("/v1/models")).status_code == 200
        times.append(time.perf_counter() - start)
    assert min(times[15:]) < 0.03, "Nagle's algorithm and a delayed acknowledgement take 40 ms, after the first replies"
