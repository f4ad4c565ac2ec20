"""Sends requests to a real server. `replay` sends the requests of a trace at their arrival times. `fit` sends probes,
and fits costs to their times.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from common.errors import LooseleafError, StartupError
from common.types import DTYPE_BYTES, DType, KvKind
from looseleaf.client import AsyncClient
from looseleaf.llm import LLM
from looseleaf.simulation.costs import Costs, Points, Start, at
from looseleaf.simulation.outcome import Outcome
from looseleaf.simulation.trace import TraceRequest

PREFILL_LENS = (16, 64, 128, 256, 512)
BATCHES = (1, 2, 4, 8, 16, 32)
SHORT, OUTPUT = 32, 24
ROUNDS = 4
BESIDE_OUTPUTS = 240
"""Outputs of a request beside which others arrive."""
BEGIN_STEPS, BETWEEN_STEPS = 40, 20
"""Steps of such a request before the first of the others, and between two of them."""
NUM_LONG = 4
PAUSE_S = 1.0
"""Pause before a probe that finds the machine idle."""


async def replay(address: str, requests: Sequence[TraceRequest], vocab_size: int, seed: int = 0) -> list[Outcome]:
    """Sends each request at its arrival time, regardless of the state of the others. Returns the outcomes."""
    prompts = [request.token_ids(vocab_size, seed) for request in requests]
    async with AsyncClient(address) as client:
        began = time.perf_counter()
        sent = zip(requests, prompts, strict=True)
        return list(await asyncio.gather(*(_send(client, request, prompt, began) for request, prompt in sent)))


async def _send(client: AsyncClient, request: TraceRequest, prompt: list[int], began: float) -> Outcome:
    await asyncio.sleep(max(0.0, began + request.at_s - time.perf_counter()))
    sent_s = time.perf_counter() - began  # this client's delays do not count
    times: list[float] = []
    cached = 0
    try:
        async for delta in client.stream(prompt, max_tokens=request.output_len, ignore_eos=True, temperature=0.0):
            times += [time.perf_counter() - began] * len(delta.token_ids)
            cached = delta.usage.cached_tokens if delta.usage is not None else cached
    except LooseleafError as refusal:
        return Outcome(sent_s, refusal=refusal.message)
    return Outcome(sent_s, tuple(times), cached_tokens=cached)


def kv_bytes_per_token(directory: Path, block_size: int = 16) -> int:
    """Returns the number of bytes of one position's KV in bfloat16. Raises StartupError unless the model has a single
    KV group, of full attention.
    """
    from engine.config import ModelConfig

    dtype: DType = "bfloat16"
    layout, _ = ModelConfig.from_directory(directory).kv_groups(block_size, dtype)
    if len(layout.groups) > 1 or layout.groups[0].kind is not KvKind.FULL:
        raise StartupError(f"--model {directory.name}: only models with one KV group of full attention are simulated")
    assert layout.groups[0].row_bytes == layout.groups[0].head_dim * DTYPE_BYTES[dtype]
    return layout.groups[0].bytes_per_token


async def fit(address: str, model: str, kv_bytes: int, vocab_size: int, longest: int, seed: int = -1) -> Costs:
    """Returns costs that are fitted to measurements of an idle server. The measurements use single requests, one after
    another and after pauses, and batches of requests of equal lengths.

    `longest` is the length of the longest prompt. A second fit on the same server needs another seed, because prompts
    must not be cached.
    """
    async with AsyncClient(address) as client:
        prober = _Prober(client, vocab_size, seed)
        await prober.batch(4, SHORT)  # warms up
        alone = {length: [await prober.alone(length) for _ in range(ROUNDS)] for length in (*PREFILL_LENS, longest)}
        after_pause = {n: [await prober.after_pause(n) for _ in range(ROUNDS)] for n in PREFILL_LENS}
        short = {count: await prober.batch(count, SHORT) for count in BATCHES}
        beside = [probe for n in PREFILL_LENS for probe in await prober.beside(n, short[1])]
        long_len = longest - OUTPUT
        long = await prober.batch(NUM_LONG, long_len, rounds=1)
    prefill_s = {length: statistics.median(probe.prefill_s for probe in found) for length, found in alone.items()}
    position_s = _prefill_position_s(prefill_s, longest)
    prefill = tuple(
        (float(n), max(1e-6, prefill_s[n] - position_s * n * n / 2)) for n in PREFILL_LENS
    )  # fmt: skip
    decode_position_s = max(0.0, (long - short[NUM_LONG]) / (NUM_LONG * (long_len - SHORT)))
    middle = SHORT + OUTPUT / 2
    decode: Points = tuple((float(n), max(1e-6, s - decode_position_s * n * middle)) for n, s in short.items())
    probes = [probe for found in alone.values() for probe in found]
    front_s = statistics.median(probe.front_s for probe in probes)
    step_s = at(decode, 1)
    hand_over_s = max(0.0, statistics.median(probe.second_s for probe in probes) - step_s)
    turn_s = max(0.0, statistics.median(probe.lost_s for probe in beside) / 2) if beside else 0.0
    rng = random.Random(seed)

    def starts(of_length: dict[int, list[_Probe]]) -> tuple[Start, ...]:
        found = [probe.start(n, step_s) for n, probes in of_length.items() for probe in probes]
        return tuple(rng.sample(found, len(found)))

    probes += [probe for found in after_pause.values() for probe in found]
    late_s = itertools.chain.from_iterable(probe.late_s() for probe in rng.sample(probes, len(probes)))
    return Costs(
        model, kv_bytes, prefill, position_s, decode, decode_position_s, front_s, hand_over_s, warm=starts(alone),
        idle=starts(after_pause), beside=tuple(probe.start_of(turn_s) for probe in rng.sample(beside, len(beside))),
        turn_s=turn_s, late_s=tuple(late_s),
    )  # fmt: skip


def _prefill_position_s(prefill_s: dict[int, float], longest: int) -> float:
    """Returns the time in seconds that attention takes per pair of positions, or 0.0 if `longest` has fewer than two
    steps of 512 tokens. A prompt of n tokens has n * n / 2 pairs.
    """
    steps = longest // 512
    pairs = longest**2 / 2 - steps * 512**2 / 2
    return max(0.0, (prefill_s[longest] - steps * prefill_s[512]) / pairs) if steps > 1 else 0.0


class _Probe:
    """The times of one request that was alone on the server."""

    def __init__(self, times: list[float], prefill_s: float) -> None:
        """`times` are when the request was sent, followed by the arrival of each token."""
        self.prefill_s = prefill_s
        self.front_s = times[1] - times[0] - prefill_s
        """Time until the first token that was not prefill."""
        self.second_s = times[2] - times[1]
        """Time from the first token to the second."""
        self._times = times

    def start(self, num_tokens: int, step_s: float) -> Start:
        """Returns the request's start. `step_s` is the usual time of a decode step."""
        return Start(num_tokens, self.prefill_s, max(0.0, self.front_s), max(0.0, self.second_s - step_s))

    def late_s(self) -> list[float]:
        """Returns by how much each token after the second came later than on the line through their times."""
        later = self._times[3:]
        slope, begin = statistics.linear_regression(range(len(later)), later)
        return [at_s - begin - slope * number for number, at_s in enumerate(later)]


@dataclass(frozen=True, slots=True)
class _Beside:
    """The times of a request that arrived while another one was decoded."""

    num_tokens: int
    prefill_s: float
    first_s: float
    """Time until the first token."""
    step_s: float
    """Usual time between two tokens of the other request."""
    gap_s: float
    """The longest time between two tokens of the other request meanwhile."""

    @property
    def lost_s(self) -> float:
        """The time by which the gap was longer than prefill and a step."""
        return self.gap_s - self.prefill_s - self.step_s

    def start_of(self, turn_s: float) -> Start:
        """Returns the request's start. It waited for half of a step on average, and for the change of turns."""
        front_s = self.first_s - self.prefill_s - self.step_s / 2 - turn_s
        return Start(self.num_tokens, self.prefill_s, max(0.0, front_s), 0.0)


class _Prober:
    """A sender of probes. Each probe's prompt is drawn at random with a different seed, so its prefix is not cached."""

    def __init__(self, client: AsyncClient, vocab_size: int, seed: int) -> None:
        self._client = client
        self._seed = seed
        self._vocab_size = vocab_size
        self._sent = 0

    async def alone(self, length: int) -> _Probe:
        return _Probe(*await self._send(length, OUTPUT))

    async def after_pause(self, length: int) -> _Probe:
        await asyncio.sleep(PAUSE_S)
        return await self.alone(length)

    async def beside(self, length: int, step_s: float) -> list[_Beside]:
        """Sends a long request, and ROUNDS others while it is decoded. Returns the times of those that arrived before
        its end. `step_s` is the usual time of a step.
        """
        other = asyncio.create_task(self._send(SHORT, BESIDE_OUTPUTS))
        await asyncio.sleep(BEGIN_STEPS * step_s)
        sent = []
        for _ in range(ROUNDS):
            sent.append(await self._send(length, 2))
            await asyncio.sleep(BETWEEN_STEPS * step_s)
        gaps = list(pairwise((await other)[0][1:]))
        usual_s = statistics.median(b - a for a, b in gaps)
        return [
            _Beside(length, prefill_s, times[1] - times[0], usual_s, max(meanwhile))
            for times, prefill_s in sent
            if (meanwhile := [b - a for a, b in gaps if times[0] < b and a < times[-1]])
        ]

    async def batch(self, count: int, length: int, rounds: int = ROUNDS) -> float:
        """Sends `count` requests at once. Returns the mean time in seconds between two tokens of a request, while all
        requests decode: the median of the rounds.
        """
        means = []
        for _ in range(rounds):
            found = await asyncio.gather(*(self._send(length, OUTPUT + count) for _ in range(count)))
            begin, end = max(times[1] for times, _ in found), min(times[-1] for times, _ in found)
            gaps = [b - a for times, _ in found for a, b in pairwise(times[1:]) if begin <= a and b <= end]
            means.append(statistics.fmean(gaps or [times[-1] - times[-2] for times, _ in found]))
        return statistics.median(means)

    async def _send(self, length: int, output_len: int) -> tuple[list[float], float]:
        """Returns the time at which the request was sent, followed by the arrival of each token, and the duration of
        prefill, in seconds.
        """
        self._sent += 1
        prompt = TraceRequest(0.0, ((self._sent, length),), output_len).token_ids(self._vocab_size, self._seed)
        times, prefill_s = [time.perf_counter()], 0.0
        async for delta in self._client.stream(prompt, max_tokens=output_len, ignore_eos=True, temperature=0.0):
            times += [time.perf_counter()] * len(delta.token_ids)
            prefill_s = delta.timings.prefill_ns / 1e9 if delta.timings is not None else prefill_s
        return times, prefill_s


def launch(model: str | None, max_model_len: int, num_blocks: int, block_size: int, *, dummy: bool) -> LLM:
    """Starts a server on this machine, and returns it."""
    load_format = "dummy" if dummy else "auto"
    return LLM(
        model, max_model_len=max_model_len, num_blocks=num_blocks, block_size=block_size, load_format=load_format
    )
