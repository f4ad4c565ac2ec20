"""vLLM's protocol in front of real services, spoken by plain grpcio: the tokens are those of our own API."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc

from looseleaf import LLM, AsyncClient, metrics_page
from testing.system import assert_nothing_held, inspect, prompts, wait_for

PROMPTS = prompts(16, seed=31, lengths=(5, 200))
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "max_tokens": 24, "n": 3}
Samples = dict[int, list[int]]


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), num_blocks=4096, max_model_len=1024, roles="split", vllm_grpc=True) as running:
        yield running


@pytest.fixture
async def stubs(llm: LLM) -> AsyncIterator[tuple[Any, Any, Any]]:
    channels = [grpc.aio.insecure_channel(address) for address in llm.addresses.vllm_grpc]
    regular, prefill, decode = map(vllm_engine_pb2_grpc.VllmEngineStub, channels)
    yield regular, prefill, decode
    for channel in channels:
        await channel.close()


def request(index: int, options: dict[str, Any]) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=f"r{index}",
        tokenized=pb.TokenizedInput(input_ids=PROMPTS[index]),
        sampling_params=pb.SamplingParams(**options, seed=index, ignore_eos=True),
        stream=True,
    )


async def samples_of(call: Any) -> Samples:
    tokens: Samples = {}
    async for reply in call:
        if reply.HasField("chunk"):
            tokens.setdefault(reply.chunk.index, []).extend(reply.chunk.token_ids)
    return tokens


async def prefilled(prefill: Any, message: pb.GenerateRequest) -> pb.GenerateRequest:
    """Calls the prefill endpoint as a router does, and returns the request for decode."""
    first = pb.GenerateRequest()
    first.CopyFrom(message)
    first.sampling_params.max_tokens = 1
    replies = [reply async for reply in prefill.Generate(first)]
    message.kv_transfer_params_json = replies[0].complete.kv_transfer_params_json
    return message


async def test_both_modes_give_the_tokens_of_our_own_api(llm: LLM, stubs: tuple[Any, Any, Any]) -> None:
    regular, prefill, decode = stubs
    async with AsyncClient(llm.addresses.grpc) as client:

        async def one(index: int, options: dict[str, Any]) -> None:
            own = await client.generate(PROMPTS[index], seed=index, ignore_eos=True, **options)
            expected = {index: list(sample.token_ids) for index, sample in enumerate(own.samples)}
            assert await samples_of(regular.Generate(request(index, options))) == expected
            message = await prefilled(prefill, request(index, options))
            assert await samples_of(decode.Generate(message)) == expected

        await asyncio.gather(*(one(index, (GREEDY, SAMPLED)[index % 2]) for index in range(len(PROMPTS))))
    assert_nothing_held(llm.addresses.block_store)


def num_retried(llm: LLM) -> float:
    samples = metrics_page.read(llm.addresses.http)
    return sum(sample.value for sample in samples if sample.name == "looseleaf_requests_retried_total")


async def test_a_killed_decode_worker_is_a_pause(llm: LLM, stubs: tuple[Any, Any, Any]) -> None:
    regular, prefill, decode = stubs
    options = {**GREEDY, "max_tokens": 800}
    expected = await samples_of(regular.Generate(request(0, options)))
    for _ in range(5):  # on a busy machine, decode may have sent all tokens when the kill arrives
        before, victim, tokens = num_retried(llm), llm.pids["decode"], list[int]()
        async for reply in decode.Generate(await prefilled(prefill, request(0, options))):
            if len(tokens) < 5 <= len(tokens) + len(reply.chunk.token_ids):
                os.kill(victim, signal.SIGKILL)
            tokens += reply.chunk.token_ids
        assert tokens == expected[0]
        if num_retried(llm) > before:
            return
        await asyncio.to_thread(wait_for, lambda: llm.pids["decode"], victim.__ne__, 60, "not started again")
    pytest.fail("no request was tried again")


async def test_abort_releases_the_blocks(llm: LLM, stubs: tuple[Any, Any, Any]) -> None:
    """Aborts while decode has the blocks. A ticket that is on its way to the gateway would end by its lease only."""
    regular, *_ = stubs
    call, tokens = regular.Generate(request(1, {**SAMPLED, "max_tokens": 800})), dict.fromkeys(range(3), 0)
    async for reply in call:
        tokens[reply.chunk.index] += len(reply.chunk.token_ids)
        if sum(tokens.values()) >= 12:  # prefill has drawn 3 of them
            await regular.Abort(pb.AbortRequest(request_ids=["r1"]))
    assert 12 <= sum(tokens.values()) < 3 * 800
    await asyncio.to_thread(assert_nothing_held, llm.addresses.block_store)


async def test_a_prefill_that_nobody_continues_releases_its_blocks(llm: LLM, stubs: tuple[Any, Any, Any]) -> None:
    regular, prefill, decode = stubs
    expected = await samples_of(regular.Generate(request(2, GREEDY)))
    message = await prefilled(prefill, request(2, GREEDY))
    assert inspect(llm.addresses.block_store).sealed > 0
    await asyncio.to_thread(assert_nothing_held, llm.addresses.block_store)
    assert await samples_of(decode.Generate(message)) == expected
