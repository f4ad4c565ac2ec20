"""The events of cached blocks in front of real services: they agree with what prefill finds, for each tenant alone."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc.aio
import pytest
from smg_grpc_proto import vllm_engine_pb2_grpc

from block_store.redis.redis_server import RedisHandle, connect
from looseleaf import LLM, AsyncClient
from testing.gateway.kv_mirror import KvMirror
from testing.system import prompts

BLOCK = 16
KEYS = {"acme": "a-key-of-acme", "zoo": "a-key-of-zoo"}


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisHandle]:
    with tempfile.TemporaryDirectory(prefix="kv") as directory:
        handle = connect(None, directory, confined=False)
        yield handle
        handle.close()


@pytest.fixture(scope="module")
def llm(checkpoint: Path, redis_server: RedisHandle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("".join(f"{tenant} {key}\n" for tenant, key in KEYS.items()))
    settings = {"num_blocks": 256, "max_model_len": 512, "roles": "split", "vllm_grpc": True}
    given = {**settings, "api_key_file": str(keys), "redis_url": redis_server.url}
    with LLM(str(checkpoint), **given) as running:
        yield running


@pytest.fixture
async def mirrors(llm: LLM) -> AsyncIterator[dict[str, KvMirror]]:
    """A subscriber of each tenant, and one of acme at each of the other two ports."""
    async with AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(address)) for address in llm.addresses.vllm_grpc
        ]
        regular, prefill, decode = map(vllm_engine_pb2_grpc.VllmEngineStub, channels)
        wanted = {
            "acme": KvMirror(regular, KEYS["acme"]), "zoo": KvMirror(regular, KEYS["zoo"]),
            "prefill": KvMirror(prefill, KEYS["acme"]), "decode": KvMirror(decode, KEYS["acme"]),
        }  # fmt: skip
        yield {name: await stack.enter_async_context(mirror) for name, mirror in wanted.items()}


@pytest.fixture
async def clients(llm: LLM) -> AsyncIterator[dict[str, AsyncClient]]:
    async with (
        AsyncClient(llm.addresses.grpc, api_key=KEYS["acme"]) as acme,
        AsyncClient(llm.addresses.grpc, api_key=KEYS["zoo"]) as zoo,
    ):
        yield {"acme": acme, "zoo": zoo}


async def test_prompts_and_outputs_are_announced_to_their_tenant_alone(
    mirrors: dict[str, KvMirror], clients: dict[str, AsyncClient]
) -> None:
    acme, zoo = mirrors["acme"], mirrors["zoo"]
    [prompt, salted, other] = prompts(3, seed=61, lengths=(70, 70))
    reply = await clients["acme"].generate(prompt, n=2, max_tokens=40, temperature=1.0, seed=3, ignore_eos=True)
    turns = [[*prompt, *sample.token_ids] for sample in reply.samples]
    filled = (70 + 40 - 1) // BLOCK * BLOCK  # the last token has no KV
    await acme.until(lambda: all(acme.prefix_len(turn) == filled for turn in turns))
    assert len(acme.blocks) == filled // BLOCK * 2 - 70 // BLOCK, "two samples share the prompt's blocks"
    first = acme.batches[0]
    assert first.sequence_number == 1 and [event.WhichOneof("data") for event in first.events] == ["cleared"]

    await clients["acme"].generate(salted, max_tokens=1, cache_salt="mine")
    await clients["zoo"].generate(other, max_tokens=1)
    await zoo.until(lambda: zoo.prefix_len(other) == 64)
    assert acme.prefix_len(salted) == 0 and acme.prefix_len(other) == 0
    assert len(zoo.blocks) == 4 and {ids for _, ids in zoo.blocks.values()} == {
        tuple(other[i : i + BLOCK]) for i in range(0, 64, BLOCK)
    }
    for name in ("prefill", "decode"):
        await mirrors[name].until(lambda name=name: mirrors[name].blocks == acme.blocks)


async def test_evictions_are_announced(mirrors: dict[str, KvMirror], clients: dict[str, AsyncClient]) -> None:
    """Prompts fill the arena more than once. What stays announced is what prefill then finds."""
    acme = mirrors["acme"]
    first, *asked = prompts(60, seed=62, lengths=(100, 100))
    await clients["acme"].generate(first, max_tokens=1)
    await acme.until(lambda: acme.prefix_len(first) == 96)
    for prompt in asked:
        await clients["acme"].generate(prompt, max_tokens=1)
    await acme.until(lambda: acme.prefix_len(asked[-1]) == 96 and acme.prefix_len(first) == 0)
    removed = sum(len(event.removed.block_hashes) for batch in acme.batches for event in batch.events)
    assert removed >= 6 and len(acme.blocks) <= 256, "blocks that come and go between two looks are not announced"
    for prompt in (*asked[:-20:-1], first):
        announced = acme.prefix_len(prompt)
        found = await clients["acme"].generate(prompt, max_tokens=1)
        assert found.usage.cached_tokens == announced == (0 if prompt is first else 96)


async def test_a_flush_of_redis_clears(
    redis_server: RedisHandle, mirrors: dict[str, KvMirror], clients: dict[str, AsyncClient]
) -> None:
    acme = mirrors["acme"]
    [prompt] = prompts(1, seed=63, lengths=(100, 100))
    await clients["acme"].generate(prompt, max_tokens=1)
    await acme.until(lambda: acme.prefix_len(prompt) == 96)
    before = acme.num_cleared
    redis_server.client.flushall()
    await acme.until(lambda: acme.num_cleared > before)
    await acme.until(lambda: acme.prefix_len(prompt) == 96)  # the block store has rebuilt the ledger from the arena


async def test_a_killed_block_store_loses_nothing_that_is_announced(
    llm: LLM, mirrors: dict[str, KvMirror], clients: dict[str, AsyncClient]
) -> None:
    """The arena and its ledger outlive the store, so that no block needs to be removed."""
    acme = mirrors["acme"]
    before, after = prompts(2, seed=64, lengths=(100, 100))
    await clients["acme"].generate(before, max_tokens=1)
    await acme.until(lambda: acme.prefix_len(before) == 96)
    killed = llm.pids["block_store"]
    os.kill(killed, signal.SIGKILL)
    await acme.until(lambda: llm.pids.get("block_store", killed) != killed)
    await clients["acme"].generate(after, max_tokens=1)
    await acme.until(lambda: acme.prefix_len(after) == 96)
    again = await clients["acme"].generate(before, max_tokens=1)
    assert again.usage.cached_tokens == acme.prefix_len(before) == 96
