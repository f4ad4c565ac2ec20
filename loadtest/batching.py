"""Measures the gain of continuous batching, through the whole stack: `python -m loadtest.batching`.

By default, serves the benchmarks' model with 125M random parameters on this machine. Rounds with a single request
alternate with rounds of several requests at once (16 by default), so a machine that becomes slower affects both kinds.
Prints the median tokens per second of each kind and their ratio; the last line is JSON.
"""

from __future__ import annotations

import asyncio
import json
import platform
import statistics
import sys
import time
from pathlib import Path

from pydantic import Field

from common.errors import StartupError
from common.settings import Settings, settings_config
from looseleaf import LLM, AsyncClient
from testing.system import prompts

MODEL = Path(__file__).resolve().parent.parent / "models" / "configs" / "llama-125m"


class BatchingSettings(Settings):
    """Flags of `python -m loadtest.batching`, which compares several requests at once with one at a time."""

    model_config = settings_config("LOOSELEAF_BATCHING_", "loadtest.batching")

    model: str = Field(str(MODEL), description="model directory; its weights are random")
    at_once: int = Field(16, ge=2, description="requests at once")
    prompt_tokens: int = Field(64, ge=1, description="prompt length")
    output_tokens: int = Field(128, ge=2, description="output length")
    rounds: int = Field(3, ge=1, description="rounds of each kind")
    threads: int = Field(0, ge=0, description="threads of each worker; 0: the launcher's choice")


async def run_round(client: AsyncClient, settings: BatchingSettings, num_requests: int, seed: int) -> float:
    """Sends `num_requests` requests at once, with prompts that depend on `seed`. Returns the number of output tokens
    per second, from the first send to the last token.
    """
    lengths = (settings.prompt_tokens, settings.prompt_tokens)
    started = time.perf_counter()
    done = await asyncio.gather(
        *(
            client.generate(p, max_tokens=settings.output_tokens, temperature=0.0, ignore_eos=True, seed=0)
            for p in prompts(num_requests, seed=seed, lengths=lengths)
        )
    )
    seconds = time.perf_counter() - started
    return sum(len(item.token_ids) for item in done) / seconds


async def measure(address: str, settings: BatchingSettings) -> tuple[float, float]:
    """Returns the median tokens per second of the rounds with one request, and of those with `at_once` requests."""
    alone: list[float] = []
    together: list[float] = []
    async with AsyncClient(address) as client:
        await run_round(client, settings, settings.at_once, seed=0)  # warms up
        for number in range(1, settings.rounds + 1):
            alone.append(await run_round(client, settings, 1, seed=2 * number))
            together.append(await run_round(client, settings, settings.at_once, seed=2 * number + 1))
    return statistics.median(alone), statistics.median(together)


def main(settings: BatchingSettings) -> None:
    with LLM(settings.model, load_format="dummy", max_model_len=1024, num_blocks=4096, threads=settings.threads) as llm:
        alone, together = asyncio.run(measure(llm.addresses.grpc, settings))
    print(f"one at a time         {alone:8.1f} tok/s")
    print(f"{settings.at_once:2d} at once            {together:8.1f} tok/s")
    print(f"ratio                 {together / alone:8.2f}")
    result = {
        "benchmark": "batching",
        "alone_tok_s": round(alone, 1),
        "together_tok_s": round(together, 1),
        "ratio": round(together / alone, 3),
        "at_once": settings.at_once,
        "machine": platform.processor() or platform.machine(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    try:
        main(BatchingSettings.load(sys.argv[1:]))
    except StartupError as error:
        print(f"loadtest.batching: {error}", file=sys.stderr)
        sys.exit(1)
