"""More requests than the workers can run at once: admitted ones are answered, and all others are refused at once."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from common.errors import ResourceExhausted
from looseleaf import LLM, AsyncClient, metrics_page
from testing.system import assert_nothing_held, prompts, wait_for

OPTIONS = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}


def resident_bytes(llm: LLM) -> dict[str, int]:
    """Returns the peak resident size of every service."""
    sizes = {}
    for name, pid in llm.pids.items():
        [line] = [x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmHWM")]
        sizes[name] = int(line.split()[1]) * 1024
    return sizes


async def test_1000_at_once_are_all_answered_with_the_tokens_they_have_alone(checkpoint: Path) -> None:
    kinds = prompts(25, seed=13, lengths=(5, 40))
    with LLM(str(checkpoint), num_blocks=512, max_model_len=512, max_queue=1000, max_queue_wait=600) as llm:
        alone = [llm.client.generate(p, **OPTIONS, cache_salt="alone").token_ids for p in kinds]  # type: ignore[misc]
        before = resident_bytes(llm)
        async with AsyncClient(llm.addresses.grpc) as client:
            done = await asyncio.gather(*(client.generate(kinds[i % 25], **OPTIONS) for i in range(1000)))
        grown = {name: size - before[name] for name, size in resident_bytes(llm).items()}
        assert max(grown.values()) < 200 << 20, grown
        assert [item.token_ids for item in done] == [alone[i % 25] for i in range(1000)]
        assert_nothing_held(llm.addresses.block_store)


def num_open(llm: LLM) -> float:
    """Returns the number of requests that the gateway has admitted and not answered."""
    wanted = ("looseleaf_requests_running", "looseleaf_requests_waiting")
    return sum(sample.value for sample in metrics_page.read(llm.addresses.http) if sample.name in wanted)


async def test_beyond_the_limit_refusals_come_at_once_with_a_time_to_retry(llm: LLM) -> None:
    """The queue is full with 256 long requests, the default limit. A further request arrives every 20 ms.

    No refusal waits for running work: all refusals arrive before the first long request ends. Many may be late on a
    busy machine, so the bound is for the quickest quarter. `python -m loadtest.latency` measures the latency.
    """
    waits: list[float] = []
    async with AsyncClient(llm.addresses.grpc) as client:
        long = prompts(256, seed=14, lengths=(5, 40))
        wave = [asyncio.create_task(client.generate(p, max_tokens=7000, ignore_eos=True)) for p in long]
        await asyncio.to_thread(
            wait_for, lambda: num_open(llm), lambda number: number == 256, 120.0, "not all are admitted"
        )
        for prompt in prompts(50, seed=15, lengths=(5, 40)):
            started = time.monotonic()
            with pytest.raises(ResourceExhausted) as refusal:
                await client.generate(prompt, **OPTIONS)  # type: ignore[arg-type]
            waits.append(time.monotonic() - started)
            assert refusal.value.retry_after_s is not None and refusal.value.retry_after_s > 0
            await asyncio.sleep(0.02)
        assert not any(task.done() for task in wave)
        for task in wave:
            task.cancel()
        await asyncio.gather(*wave, return_exceptions=True)
    assert sorted(waits)[len(waits) // 4] <= 1.0, sorted(waits)
    assert_nothing_held(llm.addresses.block_store)
