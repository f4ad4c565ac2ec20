"""vLLM's gRPC protocol over real sockets, with scripted workers: whole requests, and requests in two halves."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from block_store.ledger.prefix_hash import hash_blocks, prompt_chain
from block_store.redis.redis_server import RedisHandle
from common.api_keys import ApiKeys
from common.errors import InvalidArgument, StartupError
from common.rpc import Protection
from common.status import error_of
from gateway.api.grpc_service import key_check
from gateway.fleet.block_catalog import Arenas, CatalogBlock, Changes
from gateway.fleet.worker_lost import incarnation, too_late
from gateway.intake.salts import Salts
from gateway.request.isolation import Isolation
from gateway.settings import GatewaySettings
from gateway.vllm_grpc import service
from gateway.vllm_grpc.kv_events import EventBatches
from gateway.vllm_grpc.ports import SERVICE, VllmPorts
from protos.v1 import decode_pb2
from testing.gateway.kv_mirror import KvMirror
from testing.gateway.parts import EOS_ID, Fault, Script, expected_embedding, expected_ids, make_record
from testing.ledger.store import TestStore
from tests.gateway.conftest import MakeRig, Rig
from tests.gateway.test_requests import until

STORYTELLER = Path(__file__).resolve().parents[2] / "models" / "storyteller"
PROMPT = list(range(10, 40))


def settings_of(**given: Any) -> GatewaySettings:
    ports = {"vllm_grpc_port": 0, "vllm_grpc_prefill_port": 0, "vllm_grpc_decode_port": 0}
    return GatewaySettings(model="m", redis_url="redis://x", vllm_grpc=True, **{**ports, **given})


@dataclass
class Served:
    rig: Rig
    regular: Any
    prefill: Any
    decode: Any
    ports: VllmPorts


@pytest.fixture
async def serve(make_rig: MakeRig) -> AsyncIterator[Any]:
    opened: list[tuple[VllmPorts, list[grpc.aio.Channel]]] = []

    async def start(script: Script | None = None, given: dict[str, Any] | None = None, **options: Any) -> Served:
        rig = await make_rig(script, **options)
        ports = VllmPorts(
            settings_of(**given or {}), rig.authenticator, lambda who: key_check(who, rig.admission), Protection()
        )
        ports.add_services(rig.front, rig.workers, str(STORYTELLER), rig.feed)
        for server in ports.servers:
            await server.start()
        channels = [grpc.aio.insecure_channel(address) for address in ports.addresses]
        opened.append((ports, channels))
        return Served(rig, *map(vllm_engine_pb2_grpc.VllmEngineStub, channels), ports)

    yield start
    for ports, channels in opened:
        for channel in channels:
            await channel.close()
        for server in ports.servers:
            await server.stop(0)


def request(
    max_tokens: int = 8, *, stream: bool = True, prompt: list[int] = PROMPT, **params: Any
) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id="r",
        tokenized=pb.TokenizedInput(input_ids=prompt),
        sampling_params=pb.SamplingParams(max_tokens=max_tokens, **params),
        stream=stream,
    )


def as_prefill(message: pb.GenerateRequest) -> pb.GenerateRequest:
    """Returns the request that SMG sends to the prefill endpoint."""
    first = pb.GenerateRequest()
    first.CopyFrom(message)
    first.sampling_params.max_tokens, first.sampling_params.ignore_eos = 1, True
    return first


async def replies(call: Any) -> tuple[dict[int, list[int]], dict[int, pb.GenerateComplete]]:
    """Returns the tokens of all chunks, and the last messages, by sample."""
    tokens: dict[int, list[int]] = {}
    ends: dict[int, pb.GenerateComplete] = {}
    async for reply in call:
        if reply.HasField("chunk"):
            assert reply.chunk.completion_tokens == len(reply.chunk.token_ids)
            tokens.setdefault(reply.chunk.index, []).extend(reply.chunk.token_ids)
        else:
            ends[reply.complete.index] = reply.complete
    return tokens, ends


async def halves(served: Served, message: pb.GenerateRequest) -> tuple[list[int], pb.GenerateComplete]:
    """Sends a request to prefill and then to decode, as a router does. Returns decode's tokens and last message."""
    _, first = await replies(served.prefill.Generate(as_prefill(message)))
    message.kv_transfer_params_json = first[0].kv_transfer_params_json
    tokens, ends = await replies(served.decode.Generate(message))
    return tokens[0], ends[0]


def fallbacks(served: Served) -> dict[str, int]:
    return dict(served.rig.runner.head_starts.fallbacks.counts)


async def test_a_stream_has_chunks_and_a_last_message_with_its_last_tokens(serve: Any) -> None:
    served = await serve(Script(step_s=0.05))
    tokens, ends = await replies(served.regular.Generate(request(logprobs=1, prompt_logprobs=1)))
    assert tokens == {0: expected_ids(PROMPT, 8)} and list(ends[0].output_ids) == tokens[0][-1:]
    end = ends[0]
    assert (end.finish_reason, end.prompt_tokens, end.completion_tokens, end.cached_tokens) == ("length", 30, 8, 0)
    assert end.WhichOneof("matched_stop") is None


async def test_a_unary_answer_has_everything_in_one_message(serve: Any) -> None:
    served = await serve()
    tokens, ends = await replies(served.regular.Generate(request(stream=False, n=2, logprobs=1, prompt_logprobs=1)))
    assert not tokens and {i: list(e.output_ids) for i, e in ends.items()} == {
        i: expected_ids(PROMPT, 8, i) for i in range(2)
    }
    assert list(ends[0].output_logprobs.token_ids) == expected_ids(PROMPT, 8)
    assert [list(top.token_ids) for top in ends[0].output_logprobs.top_logprobs] == [
        [t] for t in expected_ids(PROMPT, 8)
    ]
    first = ends[0] if ends[0].HasField("input_logprobs") else ends[1]
    assert list(first.input_logprobs.token_ids) == PROMPT and len(first.input_logprobs.top_logprobs) == 30
    assert [p.HasField("value") for p in first.input_logprobs.token_logprobs] == [False] + [True] * 29


async def test_what_ended_a_sample_is_named(serve: Any) -> None:
    served = await serve()
    ids = expected_ids(PROMPT, 6)
    _, ends = await replies(served.regular.Generate(request(stop_token_ids=[ids[4]])))
    assert ends[0].matched_token_id == ids[4] and ends[0].finish_reason == "stop"
    piece = served.rig.assets.tokenizer.decode(ids)[1:3]
    _, ends = await replies(served.regular.Generate(request(stop=[piece])))
    assert ends[0].matched_stop_str == piece


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"mm_inputs": pb.MultimodalInputs()}, "mm_inputs"),
        ({"extra_mm_inputs": [pb.MultimodalInputs()]}, "extra_mm_inputs"),
        ({"media_refs": pb.MediaRefs()}, "media_refs"),
        ({"data_parallel_rank": 0}, "data_parallel_rank"),
        ({"kv_transfer_params": pb.KvTransferParams()}, "kv_transfer_params"),
        ({"sampling_params": pb.SamplingParams(structural_tag="x")}, "structural_tag"),
        ({"sampling_params": pb.SamplingParams(logprobs=-1)}, "logprobs"),
        ({"sampling_params": pb.SamplingParams(prompt_logprobs=-1)}, "prompt_logprobs"),
        ({"sampling_params": pb.SamplingParams(temperature=9)}, "temperature"),
        ({"sampling_params": pb.SamplingParams(logit_bias={-1: 1.0})}, "logit_bias"),
        ({"tokenized": None}, "input"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(serve: Any, fields: dict[str, Any], named: str) -> None:
    served = await serve()
    whole = {"tokenized": pb.TokenizedInput(input_ids=PROMPT), **fields}
    for stub in (served.regular, served.prefill, served.decode):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await replies(stub.Generate(pb.GenerateRequest(**whole)))
        error = error_of(caught.value)
        assert isinstance(error, InvalidArgument) and [v.field for v in error.violations] == [named]
    assert not served.rig.script.prefilled and served.rig.admission.current == 0


async def test_sampling_arrives_as_it_was_meant(serve: Any) -> None:
    served = await serve()
    await replies(
        served.regular.Generate(
            request(
                temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, seed=-3, presence_penalty=0.5, frequency_penalty=1.5,
                repetition_penalty=1.25, logit_bias={5: 2.0}, min_tokens=2, stop_token_ids=[9],
            )
        )
    )  # fmt: skip
    await replies(served.regular.Generate(request(ignore_eos=True)))
    full, bare = served.rig.script.prefilled
    sampling = full.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed) == (
        0.5,
        0.25,
        7,
        0.125,
        -3,
    )
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, 1.5, 1.25)
    assert dict(sampling.logit_bias) == {5: 2.0} and list(full.stopping.stop_token_ids) == [9, EOS_ID]
    assert full.stopping.min_tokens == 2 and list(bare.stopping.stop_token_ids) == []
    neutral = bare.sampling
    assert (neutral.temperature, neutral.top_p, neutral.top_k, neutral.repetition_penalty) == (1.0, 1.0, 0, 1.0)


async def test_max_tokens_defaults_to_the_rest_of_the_context(serve: Any) -> None:
    served = await serve(max_model_len=64)
    message = request()
    message.sampling_params.ClearField("max_tokens")
    tokens, _ = await replies(served.regular.Generate(message))
    assert len(tokens[0]) == 64 - len(PROMPT)


async def test_decode_continues_what_prefill_began(serve: Any) -> None:
    served = await serve()
    for params in ({}, {"seed": 4}, {"logprobs": 0}, {"stop_token_ids": [expected_ids(PROMPT, 6)[4]]}):
        expected = await replies(served.regular.Generate(request(**params)))
        script = served.rig.script
        del script.prefilled[:], script.submitted[:]
        assert await halves(served, request(**params)) == (expected[0][0], expected[1][0])
        assert len(script.prefilled) == len(script.submitted) == 1
        assert script.prefilled[0].sampling.seed == script.submitted[0].sampling.seed
        assert (script.prefilled[0].stopping.max_tokens, script.submitted[0].stopping.max_tokens) == (16, 8)
    assert fallbacks(served) == {} and served.rig.gate.num_running == 0


async def test_decode_judges_the_first_token_by_the_clients_limits(serve: Any) -> None:
    first = expected_ids(PROMPT, 1)[0]
    served = await serve(Script())
    tokens, end = await halves(served, request(max_tokens=1))
    assert (tokens, end.finish_reason) == ([first], "length")
    tokens, end = await halves(served, request(stop_token_ids=[first]))
    assert (tokens, end.finish_reason, end.matched_token_id) == ([first], "stop", first)
    assert not served.rig.script.submitted and fallbacks(served) == {}
    ends_at_once = await serve(Script(says=[EOS_ID]))
    tokens, end = await halves(ends_at_once, request())
    assert (tokens, end.finish_reason) == ([EOS_ID], "stop")
    tokens, _ = await halves(ends_at_once, request(ignore_eos=True))
    assert tokens[0] == EOS_ID and len(tokens) == 8


async def test_samples_that_end_with_their_first_token_leave_the_others(serve: Any) -> None:
    served = await serve()
    ended = expected_ids(PROMPT, 1, 1)[0]
    message = request(n=3, stop_token_ids=[ended])
    _, first = await replies(served.prefill.Generate(as_prefill(message)))
    assert sorted(first) == [0, 1, 2] and len({end.kv_transfer_params_json for end in first.values()}) == 1
    message.kv_transfer_params_json = first[0].kv_transfer_params_json
    tokens, ends = await replies(served.decode.Generate(message))
    assert tokens == {0: expected_ids(PROMPT, 8, 0), 1: [ended], 2: expected_ids(PROMPT, 8, 2)}
    assert [ends[i].finish_reason for i in range(3)] == ["length", "stop", "length"]
    assert served.rig.script.cancelled_samples == [(1, 1)]


async def test_stop_tokens_that_min_tokens_masks_are_masked_in_prefill(serve: Any) -> None:
    served = await serve()
    await halves(served, request(min_tokens=3, stop_token_ids=[9]))
    stopping = served.rig.script.prefilled[0].stopping
    assert (stopping.min_tokens, list(stopping.stop_token_ids)) == (1, [9, EOS_ID]) and fallbacks(served) == {}
    # prefill does not know that EOS was not to be masked
    tokens, _ = await halves(served, request(min_tokens=3, ignore_eos=True))
    assert tokens == expected_ids(PROMPT, 8) and fallbacks(served) == {"prefill not usable": 1}


async def test_a_prefill_is_continued_once_and_every_answer_is_right(serve: Any) -> None:
    served = await serve()
    message, script = request(seed=1), served.rig.script
    _, first = await replies(served.prefill.Generate(as_prefill(message)))
    for forged in (None, "A" * 22, first[0].kv_transfer_params_json, first[0].kv_transfer_params_json):
        message.kv_transfer_params_json = (
            json.dumps({"looseleaf_head_start": forged}) if forged and "{" not in forged else forged or ""
        )
        tokens, _ = await replies(served.decode.Generate(message))
        assert tokens == {0: expected_ids(PROMPT, 8)}
    assert fallbacks(served) == {"prefill not found": 2} and len(script.prefilled) == 4


async def test_a_prefill_for_another_prompt_or_sampling_is_not_used(serve: Any) -> None:
    served = await serve()
    for other in (request(prompt=[11, *PROMPT[1:]]), request(temperature=0.5), request(seed=9), request(n=2)):
        _, first = await replies(served.prefill.Generate(as_prefill(request(seed=1))))
        other.kv_transfer_params_json = first[0].kv_transfer_params_json
        tokens, _ = await replies(served.decode.Generate(other))
        assert tokens[0] == expected_ids(list(other.tokenized.input_ids), 8)
    # a request without a seed uses the prefill's seed, so only the temperature differs
    assert fallbacks(served) == {"prefill not usable": 4} and served.rig.gate.num_running == 0


@pytest.mark.parametrize("text", ["{", "[]", "{}", "7", '{"looseleaf_head_start": 1}', "[" * 100_000])
async def test_parameters_that_prefill_never_gave_are_refused(serve: Any, text: str) -> None:
    served = await serve()
    message = request()
    message.kv_transfer_params_json = text
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await replies(served.decode.Generate(message))
    assert (
        caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "kv_transfer_params_json" in caught.value.details()
    )


async def test_a_prefill_that_nobody_continues_gives_its_place_back(serve: Any, monkeypatch: Any) -> None:
    served = await serve()
    served.rig.runner.head_starts.keep_s = 0.2
    given_up: list[Any] = []
    monkeypatch.setattr(served.rig.workers, "give_up", given_up.append)
    message = request()
    _, first = await replies(served.prefill.Generate(as_prefill(message)))
    assert served.rig.gate.num_running == 1
    await until(lambda: served.rig.gate.num_running == 0)
    assert len(given_up) == 1 and fallbacks(served) == {"prefill not continued": 1}
    message.kv_transfer_params_json = first[0].kv_transfer_params_json
    tokens, _ = await replies(served.decode.Generate(message))
    assert tokens == {0: expected_ids(PROMPT, 8)}


async def test_a_continuation_that_waits_for_a_suspect_ends_at_its_deadline(serve: Any) -> None:
    served = await serve(timeout_s=1.0)
    message = request()
    _, first = await replies(served.prefill.Generate(as_prefill(message)))
    message.kv_transfer_params_json = first[0].kv_transfer_params_json
    isolation: Isolation = served.rig.runner._isolation
    isolation.died(b"suspect", "p9@0")
    worker = incarnation(served.rig.records[0])
    with await isolation.enter(b"suspect", worker) as suspect:
        assert suspect.alone
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await replies(served.decode.Generate(message))
    assert caught.value.details() == str(too_late(1.0))
    assert served.rig.gate.num_running == 0 and not served.rig.script.submitted
    tokens, _ = await halves(served, request())
    assert tokens == expected_ids(PROMPT, 8)


@pytest.mark.parametrize("fault", [Fault("die"), Fault("reject", rejection=decode_pb2.REJECTION_LOST)])
async def test_a_lost_worker_or_ticket_is_a_pause(serve: Any, fault: Fault) -> None:
    served = await serve(Script(submits=[fault]))
    tokens, _ = await halves(served, request())
    assert tokens == expected_ids(PROMPT, 8) and len(served.rig.script.prefilled) == 2


@pytest.mark.parametrize("stream", [True, False])
async def test_abort_ends_a_request_and_its_work(serve: Any, stream: bool) -> None:
    served = await serve(Script(step_s=0.05))
    call = asyncio.create_task(replies(served.regular.Generate(request(max_tokens=200, n=2, stream=stream))))
    await until(lambda: len(served.rig.script.submitted) == 1)
    await served.regular.Abort(pb.AbortRequest(request_ids=["other"]))
    await asyncio.sleep(0.1)
    assert not call.done()
    await served.regular.Abort(pb.AbortRequest(request_ids=["r"]))
    _, ends = await call
    assert [ends[i].finish_reason for i in range(2)] == ["abort", "abort"]
    await until(lambda: len(served.rig.script.cancelled) == 1 and served.rig.gate.num_running == 0)


async def test_tenants_share_neither_prefills_nor_aborts(serve: Any) -> None:
    served = await serve(Script(step_s=0.02), keys=ApiKeys({"key-a": "a", "key-b": "b"}, {}))
    a, b = [(("authorization", f"Bearer key-{who}"),) for who in "ab"]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.regular.GetModelInfo(pb.GetModelInfoRequest())
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert (await served.regular.HealthCheck(pb.HealthCheckRequest())).healthy, "health needs no key"
    message = request()
    _, first = await replies(served.prefill.Generate(as_prefill(message), metadata=a))
    message.kv_transfer_params_json = first[0].kv_transfer_params_json
    for who in (b, a):
        await replies(served.decode.Generate(message, metadata=who))
    assert fallbacks(served) == {"prefill not found": 1}
    call = asyncio.create_task(replies(served.regular.Generate(request(20), metadata=a)))
    await until(lambda: len(served.rig.script.submitted) == 3)
    await served.regular.Abort(pb.AbortRequest(request_ids=["r"]), metadata=b)
    assert (await call)[1][0].finish_reason == "length"


async def test_calls_without_a_key_may_belong_to_one_tenant(serve: Any) -> None:
    served = await serve(given={"vllm_grpc_tenant": "router"}, keys=ApiKeys({"key-a": "a"}, {}))
    await replies(served.regular.Generate(request()))
    await replies(served.regular.Generate(request(), metadata=(("authorization", "Bearer key-a"),)))
    with pytest.raises(grpc.aio.AioRpcError):
        await replies(served.regular.Generate(request(), metadata=(("authorization", "Bearer wrong"),)))
    salts = [prefill.cache_salt for prefill in served.rig.script.prefilled]
    assert len(salts) == 2 and salts[0] != salts[1]


async def test_only_keys_open_the_ports_to_other_machines(make_rig: MakeRig) -> None:
    rig = await make_rig()
    keyed = await make_rig(keys=ApiKeys({"key-a": "a"}, {}))
    for who, given in ((rig, {}), (keyed, {"vllm_grpc_tenant": "router"})):
        with pytest.raises(StartupError, match="only loopback"):
            settings = settings_of(vllm_grpc_host="0.0.0.0", **given)
            VllmPorts(settings, who.authenticator, key_check, Protection())
    ports = VllmPorts(settings_of(vllm_grpc_host="0.0.0.0"), keyed.authenticator, key_check, Protection())
    assert len(ports.addresses) == 3


async def test_a_router_learns_what_it_asks_for(serve: Any) -> None:
    served = await serve()
    model = await served.regular.GetModelInfo(pb.GetModelInfoRequest())
    assert (model.served_model_name, model.max_context_length, model.vocab_size) == ("tiny", 512, 400)
    assert (
        model.is_generation
        and list(model.eos_token_ids) == [EOS_ID]
        and list(model.architectures) == ["LlamaForCausalLM"]
    )
    assert Path(model.tokenizer_path) == STORYTELLER and json.loads(model.default_sampling_params_json)["top_p"] == 1.0
    infos = [
        await stub.GetServerInfo(pb.GetServerInfoRequest()) for stub in (served.regular, served.prefill, served.decode)
    ]
    assert [info.kv_role for info in infos] == ["kv_both", "kv_producer", "kv_consumer"]
    assert (
        len({info.pairing_protocol for info in infos}) == 1 and infos[0].block_size == 16 and infos[2].max_num_seqs == 8
    )
    [load] = (await served.decode.GetLoads(pb.GetLoadsRequest())).loads
    assert load.max_running_requests == 8 and load.num_running_reqs == 0
    chunks = [chunk async for chunk in served.regular.GetTokenizer(common_pb2.GetTokenizerRequest())]
    assert chunks[-1].sha256 and b"tokenizer.json" in b"".join(chunk.data for chunk in chunks)
    with pytest.raises(grpc.aio.AioRpcError, match="the cache has other users") as caught:
        await served.regular.FlushCache(common_pb2.FlushCacheRequest())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_events_of_blocks_are_for_the_key_that_subscribed(
    serve: Any, redis_handle: RedisHandle, tmp_path: Path
) -> None:
    store, rules = TestStore(redis_handle.client, tmp_path), make_record("prefill", "p0").kv_rules
    arenas = Arenas(frozenset({("00", rules)}), [store.ledger])
    served = await serve(keys=ApiKeys({"key-a": "a", "key-b": "b"}, {}), arenas=lambda: arenas)
    prompt = list(range(10, 60))
    start, _ = prompt_chain(b"\0", Salts(b"secret").derive("a", None), prompt, 0, 16)
    store.fill(store.caller(), hashes := hash_blocks(start, prompt, 16))
    async with KvMirror(served.regular, "key-a") as a, KvMirror(served.decode, "key-b") as b:
        for key in ("key-a", "key-b"):
            metadata = (("authorization", f"Bearer {key}"),)
            await replies(served.regular.Generate(request(prompt=prompt), metadata=metadata))
        await a.until(lambda: len(a.blocks) == 3)
        assert list(a.blocks) == [int.from_bytes(each[:8], "big", signed=True) for each in hashes]
        assert list(a.blocks.values()) == [
            (parent, tuple(prompt[i : i + 16])) for parent, i in zip([None, *a.blocks], (0, 16, 32), strict=False)
        ]
        async with KvMirror(served.prefill, "key-a", start_sequence_number=7) as late:
            await late.until(lambda: late.blocks == a.blocks)
            assert [batch.sequence_number for batch in late.batches] == [8, 9]
        await until(lambda: served.rig.feed.num_subscribers == 2)
        assert not b.blocks and b.num_cleared == 1
        served.rig.authenticator.replace({"key-b": "b"})
        store.client.flushall()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await a.until(lambda: False)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED and a.blocks, "it hears no more"
        served.rig.feed.close()
        await b.until(b.call.done)
        assert await b.call.code() is grpc.StatusCode.OK
    for start_number, code in ((1 << 63, "INVALID_ARGUMENT"), (0, "UNAVAILABLE")):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with KvMirror(served.regular, "key-b", start_number):
                pass
        assert caught.value.code().name == code
    store.arena.remove()


async def test_a_subscriber_that_reads_nothing_does_not_keep_its_place(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "STALLED_CLIENT_S", 0.3)
    served = await serve()
    call = served.regular.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
    await until(lambda: served.rig.feed.num_subscribers == 1)
    [tenant] = served.rig.feed._tenants.values()
    [subscription] = tenant.subscriptions
    await until(lambda: not subscription.is_behind)
    parents = [None, *(number.to_bytes(8, "big") for number in range(16_000))]
    blocks = [CatalogBlock(own, parent, array("I", range(256)), ()) for parent, own in pairwise(parents)]
    subscription.put(Changes(stored=tuple(blocks)))  # more than the connection buffers
    await until(lambda: served.rig.feed.num_subscribers == 0)
    call.cancel()


async def test_a_long_list_of_blocks_is_sent_in_parts_without_a_gap() -> None:
    blocks = [
        CatalogBlock(bytes([n // 256, n % 256]) * 16, None if n == 0 else bytes([(n - 1) // 256, (n - 1) % 256]) * 16,
                     array("I", [n] * 16), ())
        for n in range(2500)
    ]  # fmt: skip
    batches = EventBatches(0)
    sent = list(batches.of(Changes(True, tuple(b.prefix_hash for b in blocks[:1500]), tuple(blocks))))
    assert [batch.sequence_number for batch in sent] == list(range(1, 7))
    assert [[event.WhichOneof("data") for event in batch.events] for batch in sent] == [
        ["cleared"], *[["removed"]] * 2, *[["stored"]] * 3
    ]  # fmt: skip
    stored = [event.stored for batch in sent for event in batch.events if event.HasField("stored")]
    assert [len(each.blocks) for each in stored] == [1024, 1024, 452]
    assert not stored[0].HasField("parent_block_hash")
    assert stored[1].parent_block_hash == stored[0].blocks[-1].block_hash
    assert [event.event_id for batch in sent for event in batch.events] == list(range(1, 7))


async def test_embeddings_are_those_of_our_own_api(serve: Any) -> None:
    served = await serve(Script(prefills=[0.0, 0.0, 600.0]))
    asked = pb.EmbedRequest(request_id="e", tokenized=pb.TokenizedInput(input_ids=[5, 6, 7]))
    for stub in (served.regular, served.prefill):
        reply = await stub.Embed(asked)
        assert list(reply.embedding) == expected_embedding([5, 6, 7])
        assert reply.embedding_dim == len(reply.embedding) and reply.prompt_tokens == 3
    for wrong in (pb.EmbedRequest(), pb.EmbedRequest(tokenized=pb.TokenizedInput(input_ids=[10**6]))):
        with pytest.raises(grpc.aio.AioRpcError, match="tokenized") as caught:
            await served.regular.Embed(wrong)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError) as late:
        await served.regular.Embed(asked, timeout=0.2)
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: served.rig.admission.current == 0)


async def test_health_follows_the_workers(serve: Any) -> None:
    served = await serve()
    async with grpc.aio.insecure_channel(served.ports.addresses[0]) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        await served.ports.servers[0].set_ready(True)
        reply = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE))
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
