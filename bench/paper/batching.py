"""Compares continuous batching with static batching and with one request at a time (Orca), with real services.

The client forms static batches: it sends the next batch when all requests of the last one have ended. In the arm
"static, padded", each request of a batch generates as many tokens as the longest one, as in a server that computes a
batch until its last request ends.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from bench.paper.parts import Claim, Options, Section, table
from bench.served.simulated import MODEL
from loadtest.svg import axis_of, bars
from looseleaf.client import AsyncClient
from looseleaf.llm import LLM
from testing.system import prompts

LIMIT_S = 120
BATCH, NUM_REQUESTS, NUM_ALONE = 16, 48, 8
QUICK_REQUESTS, QUICK_ALONE = 8, 2
ROUNDS = 1
PROMPT, MEAN_OUTPUT, MOST_OUTPUT = (16, 64), 40, 160
"""The range of prompt lengths; the mean and the largest output length in tokens, before they are limited."""
Work = Sequence[tuple[list[int], int]]
"""Prompts, and the numbers of tokens to generate."""
Done = dict[str, float]


def work(num: int, seed: int) -> Work:
    """Returns requests with exponentially distributed output lengths."""
    rng = random.Random(f"batching/{seed}")
    lens = [max(1, min(MOST_OUTPUT, round(rng.expovariate(1 / MEAN_OUTPUT)))) for _ in range(num)]
    return list(zip(prompts(num, seed=seed, lengths=PROMPT), lens, strict=True))


def batches(requests: Work) -> list[Work]:
    return [requests[start : start + BATCH] for start in range(0, len(requests), BATCH)]


class Sender:
    """A client that sends the requests of one arm, and records the time until each answer is complete."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._latencies: list[float] = []

    async def _send(self, prompt: list[int], num_tokens: int) -> None:
        answer = await self._client.generate(prompt, max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        assert len(answer.token_ids) == num_tokens
        self._latencies.append(time.perf_counter() - self._began)

    async def _alone(self, requests: Work) -> None:
        for prompt, num_tokens in requests:
            await self._send(prompt, num_tokens)

    async def _static(self, requests: Work) -> None:
        for batch in batches(requests):
            await asyncio.gather(*(self._send(prompt, num_tokens) for prompt, num_tokens in batch))

    async def _padded(self, requests: Work) -> None:
        for batch in batches(requests):
            longest = max(num_tokens for _, num_tokens in batch)
            await asyncio.gather(*(self._send(prompt, longest) for prompt, _ in batch))

    async def _continuous(self, requests: Work) -> None:
        places = asyncio.Semaphore(BATCH)

        async def send(prompt: list[int], num_tokens: int) -> None:
            async with places:
                await self._send(prompt, num_tokens)

        await asyncio.gather(*(send(*request) for request in requests))

    async def run(self, name: str, requests: Work) -> Done:
        """Returns the requested tokens per second, and the mean time in seconds from the start until an answer is
        complete.
        """
        arms: dict[str, Callable[[Work], Awaitable[None]]] = {
            "one at a time": self._alone, "static, padded": self._padded, "static": self._static,
            "continuous": self._continuous,
        }  # fmt: skip
        self._latencies, self._began = [], time.perf_counter()
        await arms[name](requests)
        seconds = time.perf_counter() - self._began
        return {
            "tokens_per_s": sum(num_tokens for _, num_tokens in requests) / seconds,
            "latency_s": statistics.fmean(self._latencies),
        }


ARMS = ("one at a time", "static, padded", "static", "continuous")


async def rounds(address: str, options: Options) -> dict[str, Done]:
    """Returns the medians of each arm over the rounds. All arms of a round have the same lengths."""
    num, alone = (QUICK_REQUESTS, QUICK_ALONE) if options.quick else (NUM_REQUESTS, NUM_ALONE)
    found: dict[str, list[Done]] = {name: [] for name in ARMS}
    async with AsyncClient(address) as client:
        sender = Sender(client)
        await sender.run("static", work(BATCH, -1))  # warms up
        for number in range(1 if options.quick else ROUNDS):
            for index, name in enumerate(ARMS if number % 2 else reversed(ARMS)):
                requests = work(num, number)
                fresh = prompts(num, seed=100 * number + index + 1, lengths=PROMPT)  # no prompt is cached
                requests = [(prompt, lens) for prompt, (_, lens) in zip(fresh, requests, strict=True)]
                found[name].append(await sender.run(name, requests[:alone] if name == ARMS[0] else requests))
    return {
        name: {key: round(statistics.median(done[key] for done in runs), 3) for key in runs[0]}
        for name, runs in found.items()
    }


def measure(options: Options) -> dict[str, Any]:
    with LLM(str(MODEL), load_format="dummy", max_model_len=1024, num_blocks=4096, max_num_seqs=BATCH) as llm:
        arms = asyncio.run(rounds(llm.addresses.grpc, options))
    num = QUICK_REQUESTS if options.quick else NUM_REQUESTS
    lens = [[num_tokens for _, num_tokens in work(num, number)] for number in range(1 if options.quick else ROUNDS)]
    return {
        "requests": num, "batch": BATCH, "mean_output": round(statistics.fmean(map(statistics.fmean, lens)), 1),
        "longest_over_mean": round(statistics.median(map(longest_over_mean, lens)), 2), "arms": arms,
    }  # fmt: skip


def longest_over_mean(lens: Sequence[int]) -> float:
    """Returns the number of tokens that padded batches compute, over the number of requested tokens."""
    parts = [lens[start : start + BATCH] for start in range(0, len(lens), BATCH)]
    return sum(len(part) * max(part) for part in parts) / sum(lens)


def section(result: Mapping[str, Any]) -> Section:
    arms, padding = result["arms"], result["longest_over_mean"]
    rate = {name: done["tokens_per_s"] for name, done in arms.items()}
    gain, padded = rate["continuous"] / rate["static"], rate["continuous"] / rate["static, padded"]
    done, padded_done = arms["continuous"]["latency_s"], arms["static, padded"]["latency_s"]
    claims = [
        Claim(
            "continuous batching has more throughput than static batches", "Orca, abstract",
            "36.9 times FasterTransformer at the same latency, GPT-3 175B", f"{padded:.2f} times", padded > 1.2,
            "the factor depends on the lengths: with these, a static batch computes "
            f"{padding:.2f} tokens per requested one. The paper's factor also includes waiting for a batch at a limit "
            "on latency" if padded > 1.2 else "at these lengths, a step's time grows with its batch on this CPU",
        ),
        Claim(
            "answers of short requests arrive earlier, because they do not wait for the batch's longest",
            "Orca, section 3", "lower latency",
            f"mean {done:.2f} s, static {padded_done:.2f} s", done < padded_done,
            "" if done < padded_done else "other work on the machine",
        ),
    ]  # fmt: skip
    described = (
        f"Real services with llama-125m (random weights) serve {result['requests']} requests that all wait from the "
        f"beginning, at most {result['batch']} at once. Outputs have {result['mean_output']:g} tokens in the mean "
        f"(exponentially distributed, at most {MOST_OUTPUT}). The client forms the static batches. With *static, "
        f"padded*, a request computes until the longest one of its batch ends, which is {padding:.2f} times the "
        "requested tokens. With *static*, a request that ends early leaves the batch, but no other takes its place. "
        "*One at a time* serves the first few requests only. Throughput counts requested tokens. Latency is the mean "
        f"time from the start until an answer is complete. Without padding, continuous batching has {gain:.2f} times "
        "the throughput of static batches.\n\n"
        + table(
            ["arm", "tokens/s", "over one at a time", "mean latency (s)"],
            [
                [name, f"{done['tokens_per_s']:.0f}", f"{done['tokens_per_s'] / rate[ARMS[0]]:.2f}",
                 "" if name == ARMS[0] else f"{done['latency_s']:.2f}"]
                for name, done in arms.items()
            ],
        )
    )  # fmt: skip
    values = [rate[name] for name in ARMS]
    plot = bars(
        "Requested tokens per second, by kind of batch",
        axis_of("tokens/s", values, zero=True), list(ARMS), {"tokens/s": values},
    )  # fmt: skip
    return Section("Static and continuous batching", described, claims, {"batching.svg": plot})
