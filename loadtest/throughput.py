"""Measures tokens per second through the whole stack, on a CPU or a GPU: `python -m loadtest.throughput`.

Serves a model with random weights on this machine and keeps a constant number of requests in flight, all of the same
size. Prints tokens per second, the time to first token and the time between tokens; the last line is JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field

from common.errors import StartupError
from common.settings import AttentionBackend, Settings, settings_config
from common.types import KvCacheDType
from loadtest.batching import MODEL
from loadtest.latency import percentile_ms
from looseleaf import LLM, AsyncClient
from testing.system import prompts

SERVE = (
    "roles", "device", "attention_backend", "attention_library", "deterministic", "enforce_eager", "kv_cache_dtype",
    "max_num_batched_tokens",
)  # fmt: skip


class ThroughputSettings(Settings):
    """Flags of `python -m loadtest.throughput`, which measures the tokens per second of a machine."""

    model_config = settings_config("LOOSELEAF_THROUGHPUT_", "loadtest.throughput")

    model: str = Field(str(MODEL), description="model directory; its weights are random")
    requests: int = Field(128, ge=1, description="number of requests in all")
    at_once: int = Field(32, ge=1, description="requests in flight")
    prompt_tokens: int = Field(256, ge=1, description="prompt length")
    output_tokens: int = Field(64, ge=2, description="output length")
    roles: Literal["auto", "both", "split"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    attention_backend: AttentionBackend = "auto"
    attention_library: str | None = None
    deterministic: bool = False
    enforce_eager: bool = False
    kv_cache_dtype: KvCacheDType = "auto"
    max_num_batched_tokens: int = Field(512, ge=1, description="maximum number of tokens in a prefill step")


@dataclass(slots=True)
class Seen:
    """A record of the observations of all clients."""

    first_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    seconds: float = 0.0


async def client_loop(client: AsyncClient, work: Iterator[list[int]], length: int, seen: Seen) -> None:
    """Sends requests one after another until `work` has no more prompts, and adds the times to `seen`."""
    for prompt in work:
        at = started = time.perf_counter()
        first = True
        async for piece in client.stream(prompt, max_tokens=length, temperature=0.0, ignore_eos=True):
            if piece.token_ids:
                now = time.perf_counter()
                (seen.first_s if first else seen.gap_s).append(now - (started if first else at))
                seen.num_tokens += len(piece.token_ids)
                at, first = now, False


async def run(address: str, settings: ThroughputSettings) -> Seen:
    """Sends a few requests that warm up the server, then all requests. Returns the observations."""
    lengths = (settings.prompt_tokens, settings.prompt_tokens)
    async with AsyncClient(address) as client:
        await asyncio.gather(*(client.generate(p, max_tokens=4) for p in prompts(4, seed=1, lengths=lengths)))
        work, seen = iter(prompts(settings.requests, seed=2, lengths=lengths)), Seen()
        started = time.perf_counter()
        loops = (client_loop(client, work, settings.output_tokens, seen) for _ in range(settings.at_once))
        await asyncio.gather(*loops)
        seen.seconds = time.perf_counter() - started
    return seen


def main(settings: ThroughputSettings) -> None:
    options = {name: getattr(settings, name) for name in SERVE}
    longest = settings.prompt_tokens + settings.output_tokens
    with LLM(
        settings.model, load_format="dummy", max_model_len=longest, max_num_seqs=settings.at_once, **options
    ) as llm:
        seen = asyncio.run(run(llm.addresses.grpc, settings))
    result = {
        "benchmark": "throughput", **settings.model_dump(mode="json"), "seconds": round(seen.seconds, 2),
        "output_tok_s": round(seen.num_tokens / seen.seconds, 1),
        "total_tok_s": round((seen.num_tokens + settings.requests * settings.prompt_tokens) / seen.seconds, 1),
    }  # fmt: skip
    for name, waits in (("ttft", seen.first_s), ("itl", seen.gap_s)):
        result |= {f"{name}_{label}_ms": percentile_ms(waits, share) for label, share in (("p50", 0.5), ("p99", 0.99))}
    print(f"{result['output_tok_s']:10.1f} tok/s out, {result['total_tok_s']:.1f} with prompts")
    print(f"{'':10} ms    first token p50 {result['ttft_p50_ms']}, p99 {result['ttft_p99_ms']}")
    print(f"{'':10} ms between tokens p50 {result['itl_p50_ms']}, p99 {result['itl_p99_ms']}")
    print(json.dumps(result))


if __name__ == "__main__":
    try:
        main(ThroughputSettings.load(sys.argv[1:]))
    except StartupError as error:
        print(f"loadtest.throughput: {error}", file=sys.stderr)
        sys.exit(1)
