"""InferenceService over a real socket: statuses with details, deadlines, cancellation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from common.errors import InvalidArgument, ResourceExhausted
from common.rpc import RpcServer
from common.status import error_of
from gateway.api.grpc_service import InferenceServicer, key_check
from protos.v1 import inference_pb2 as pb
from protos.v1 import inference_pb2_grpc
from protos.v1 import types_pb2 as types_pb
from testing.gateway.parts import Script, beam_score, expected_ids
from tests.gateway.conftest import MakeRig, Rig
from tests.gateway.test_requests import until


@pytest.fixture
async def serve(make_rig: MakeRig) -> AsyncIterator[Any]:
    open_things: list[Any] = []

    async def start(script: Script | None = None, **options: Any) -> tuple[Rig, Any]:
        rig = await make_rig(script, **options)
        server = RpcServer("127.0.0.1", 0, check=key_check(rig.authenticator))
        add = inference_pb2_grpc.add_InferenceServiceServicer_to_server
        server.add(add, InferenceServicer(rig.front), "looseleaf.v1.InferenceService")
        await server.start()
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.port}")
        open_things.append((channel, server))
        return rig, inference_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]

    yield start
    for channel, server in open_things:
        await channel.close()
        await server.stop(0)


def request(text: str = "the mill", max_tokens: int = 8, **sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        text=text,
        sampling=types_pb.SamplingParams(**sampling),
        stopping=types_pb.StoppingParams(max_tokens=max_tokens),
    )


async def test_a_stream_brings_tokens_text_usage_and_timings(serve: Any) -> None:
    rig, stub = await serve()
    responses = [r async for r in stub.Generate(request(logprobs=0, prompt_logprobs=0))]
    prompt = rig.assets.tokenizer.encode("the mill").ids
    ids = [token for r in responses for token in r.token_ids]
    assert ids == expected_ids(prompt, 8) and "".join(r.text_delta for r in responses) == rig.assets.tokenizer.decode(
        ids
    )
    assert [p.token_id for r in responses for p in r.logprobs] == ids
    assert [p.token_id for p in responses[0].prompt_logprobs] == prompt[1:]
    last = responses[-1]
    assert last.finish_reason == types_pb.FINISH_REASON_LENGTH and last.WhichOneof("stop_reason") is None
    assert (
        last.usage.sources.computed_tokens == last.usage.handed_over_tokens == last.usage.prompt_tokens == len(prompt)
    )
    assert last.usage.completion_tokens == 8 and last.timings.decode_ns == 4_000_000
    assert len({r.request_id for r in responses}) == 1 and last.request_id.startswith("gen-")


async def test_every_token_is_part_of_the_stream(serve: Any) -> None:
    rig, stub = await serve(Script(step_s=0.01))
    responses = [r async for r in stub.Generate(request(max_tokens=20))]
    ids = expected_ids(rig.assets.tokenizer.encode("the mill").ids, 20)
    assert [token for r in responses for token in r.token_ids] == ids
    assert "".join(r.text_delta for r in responses) == rig.assets.tokenizer.decode(ids)
    assert len({r.request_id for r in responses}) == 1 and responses[-1].usage.completion_tokens == 20


async def test_a_stop_string_is_named(serve: Any) -> None:
    _, stub = await serve()
    whole = "".join([r.text_delta async for r in stub.Generate(request(max_tokens=60))])
    stop = whole[10:13]
    message = request(max_tokens=60)
    message.stopping.stop.append(stop)
    responses = [r async for r in stub.Generate(message)]
    assert "".join(r.text_delta for r in responses) == whole[: whole.index(stop)]
    assert responses[-1].stop_string == stop and responses[-1].finish_reason == types_pb.FINISH_REASON_STOP


async def test_field_violations_come_as_details(serve: Any) -> None:
    _, stub = await serve()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [r async for r in stub.Generate(request(temperature=9.0, top_p=0.0))]
    error = error_of(caught.value)
    assert isinstance(error, InvalidArgument) and [v.field for v in error.violations] == ["temperature", "top_p"]


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (pb.GenerateRequest(), grpc.StatusCode.INVALID_ARGUMENT),
        (pb.GenerateRequest(text="x", model="other"), grpc.StatusCode.NOT_FOUND),
        (request(num_sequences=9), grpc.StatusCode.INVALID_ARGUMENT),
        (request(beam_width=33), grpc.StatusCode.INVALID_ARGUMENT),
        (request(temperature=float("nan")), grpc.StatusCode.INVALID_ARGUMENT),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[2**32 - 1])), grpc.StatusCode.INVALID_ARGUMENT),
        (pb.GenerateRequest(token_ids=pb.TokenIds()), grpc.StatusCode.INVALID_ARGUMENT),
        (pb.GenerateRequest(chat=pb.Chat()), grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_bad_requests_have_their_status(serve: Any, message: pb.GenerateRequest, code: grpc.StatusCode) -> None:
    rig, stub = await serve()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [r async for r in stub.Generate(message)]
    assert caught.value.code() is code and not rig.script.prefilled and rig.admission.current == 0


async def test_beyond_the_queue_limit_refusals_are_quick_and_say_when_to_come_back(serve: Any) -> None:
    rig, stub = await serve(Script(step_s=0.05), max_queue=4)
    held = [asyncio.create_task(_drain(stub.Generate(request(max_tokens=400)))) for _ in range(4)]
    await until(lambda: rig.admission.current == 4)
    delays = []
    for _ in range(20):
        began = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _drain(stub.Generate(request()))
        delays.append(time.monotonic() - began)
        error = error_of(caught.value)
        assert isinstance(error, ResourceExhausted) and error.retry_after_s is not None
    assert min(delays) < 0.05 and not any(task.done() for task in held)
    for task in held:
        task.cancel()
    await until(lambda: rig.admission.current == 0)


async def test_the_clients_deadline_bounds_every_hop(serve: Any) -> None:
    rig, stub = await serve(Script(step_s=0.05))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _drain(stub.Generate(request(max_tokens=400), timeout=4.0))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: rig.script.cancelled == [1])
    assert 0 < rig.script.submitted[0].timeout_ms < 4000
    await until(lambda: rig.admission.current == 0)


async def test_a_cancelled_call_is_cancelled_at_the_worker(serve: Any) -> None:
    rig, stub = await serve(Script(step_s=0.02))
    call = stub.Generate(request(max_tokens=400))
    await call.read()
    call.cancel()
    await until(lambda: rig.script.cancelled == [1] and rig.admission.current == 0)


async def test_credentials_are_asked_for_on_every_method(serve: Any) -> None:
    _, stub = await serve(api_key="s3cret")
    calls = [
        (stub.Tokenize, pb.TokenizeRequest(text="x")),
        (stub.Detokenize, pb.DetokenizeRequest(token_ids=[5])),
        (stub.ListModels, pb.ListModelsRequest()),
        (stub.Embed, pb.EmbedRequest(text="x")),
        (stub.Explain, pb.ExplainRequest()),
    ]
    assert {m.name for m in pb.DESCRIPTOR.services_by_name["InferenceService"].methods} == {
        "Generate", "Embed", "Tokenize", "Detokenize", "ListModels", "Explain",
    }  # fmt: skip
    good = (("authorization", "Bearer s3cret"),)
    for metadata in ((), (("authorization", "Bearer wrong"),)):
        for method, message in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await method(message, metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _drain(stub.Generate(request(), metadata=metadata))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    for method, message in calls:
        await method(message, metadata=good)
    await _drain(stub.Generate(request(), metadata=good))


async def test_tokenize_detokenize_and_list_models(serve: Any) -> None:
    rig, stub = await serve()
    reply = await stub.Tokenize(pb.TokenizeRequest(text="the mill"))
    assert list(reply.token_ids) == rig.assets.tokenizer.encode("the mill").ids and reply.max_model_len == 512
    bare = await stub.Tokenize(pb.TokenizeRequest(text="the mill", add_special_tokens=False))
    assert list(bare.token_ids) == list(reply.token_ids)[1:]
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="x")])
    ids = (await stub.Tokenize(pb.TokenizeRequest(chat=chat))).token_ids
    assert (await stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))).text == "<user>x\n<assistant>"
    models = (await stub.ListModels(pb.ListModelsRequest())).models
    assert [(m.id, m.max_model_len, list(m.eos_token_ids)) for m in models] == [("tiny", 512, [2])]


async def test_samples_come_with_their_index_and_usage_once(serve: Any) -> None:
    rig, stub = await serve()
    responses = [r async for r in stub.Generate(request(num_sequences=3))]
    prompt = rig.assets.tokenizer.encode("the mill").ids
    for index in range(3):
        mine = [r for r in responses if r.index == index]
        assert [t for r in mine for t in r.token_ids] == expected_ids(prompt, 8, index)
        assert [r.finish_reason for r in mine if r.finish_reason] == [types_pb.FINISH_REASON_LENGTH]
    assert [r.HasField("usage") for r in responses] == [False] * (len(responses) - 1) + [True]
    assert responses[-1].usage.completion_tokens == 24 and responses[-1].usage.prompt_tokens == len(prompt)
    assert not any(r.HasField("beam_score") for r in responses)


@pytest.mark.parametrize("stopping", [None, types_pb.BEAM_STOPPING_EARLY, types_pb.BEAM_STOPPING_NEVER])
async def test_beams_come_with_their_scores(serve: Any, stopping: types_pb.BeamStopping | None) -> None:
    rig, stub = await serve()
    message = request(beam_width=3, num_sequences=2, length_penalty=0.5)
    if stopping is not None:
        message.sampling.early_stopping = stopping
    responses = [r async for r in stub.Generate(message)]
    assert [(r.index, r.beam_score) for r in responses] == [(rank, beam_score(rank)) for rank in range(2)]
    told = rig.script.submitted[0].sampling
    assert (told.beam_width, told.num_sequences, told.length_penalty) == (3, 2, 0.5)
    assert told.early_stopping == (stopping or types_pb.BEAM_STOPPING_HEURISTIC)
    message.sampling.early_stopping = 99
    with pytest.raises(grpc.aio.AioRpcError, match="early_stopping"):
        await _drain(stub.Generate(message))


async def _drain(call: Any) -> None:
    async for _ in call:
        pass
