"""One request is one trace, from the client through the gateway, prefill, decode and two block stores."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from looseleaf import metrics_page
from protos.v1 import inference_pb2 as pb
from protos.v1 import inference_pb2_grpc, types_pb2
from testing.collector import Collector, Received
from testing.system import prompts, wait_for
from testing.two_hosts import TwoHosts

PARENTS = {
    "attempt": "text_completion tiny-llama",
    "prefill": "attempt",
    "prefill.queue": "prefill",
    "ledger.acquire": "prefill.queue",
    "prefill.compute": "prefill",
    "ledger.hand_over": "prefill",
    "pull": "attempt",
    "keep_ticket": "pull",
    "decode": "attempt",
    "ledger.claim": "decode",
    "decode.run": "decode",
}
"""The spans that every request of this system has, each with its parent. Short waits have none."""
SLACK_NS = 2_000_000
"""Clocks of processes are read one after the other."""
WAIT_S = 60.0


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture(scope="module")
def hosts(checkpoint: Path, collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    """Prefill and decode with an arena and a block store each, so that a request takes five processes."""
    # On a busy machine, workers that measure for themselves may choose kernels whose bits differ.
    choices = str(tmp_path_factory.mktemp("choices"))
    variables = {**collector.environment, "OTEL_EXPORTER_OTLP_TIMEOUT": "1", "KERNELS_CHOICES": choices}
    for service in ("GATEWAY", "PREFILL", "DECODE"):
        variables |= {f"LOOSELEAF_{service}_LOG_FORMAT": "json", f"LOOSELEAF_{service}_LOG_LEVEL": "DEBUG"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        running = TwoHosts(checkpoint, namespaces=False)
        yield running
        running.close()


async def whole(collector: Collector, trace_id: str, names: set[str], killed: str = "") -> list[Received]:
    """Waits until the collector has the root, these spans and all parents of a trace, and returns all of its spans.

    Leaves out spans of the service `killed` without their parent: the killed process may have exported only the child.
    """
    root = PARENTS["attempt"]

    def spans_of_trace() -> list[Received]:
        spans = collector.trace(trace_id)
        ids = {span.message.span_id for span in spans}
        return [span for span in spans if span.service != killed or span.message.parent_span_id in ids]

    def is_whole(spans: list[Received]) -> bool:
        ids = {span.message.span_id for span in spans}
        parents = {span.message.parent_span_id for span in spans if span.name != root}
        return {span.name for span in spans} >= {root, *names} and parents <= ids

    await asyncio.to_thread(wait_for, spans_of_trace, is_whole, WAIT_S, "not in the collector")
    return spans_of_trace()


def assert_is_tree(spans: list[Received]) -> None:
    """Every span but the root has its parent in the trace, and is within its parent's time."""
    by_id = {span.message.span_id: span for span in spans}
    for span in spans:
        if span.name == PARENTS["attempt"]:
            continue
        parent = by_id[span.message.parent_span_id]
        assert parent.name == PARENTS.get(span.name, parent.name), span.name
        first, last = span.message.start_time_unix_nano, span.message.end_time_unix_nano
        assert parent.message.start_time_unix_nano - SLACK_NS <= first <= last, span.name
        assert last <= parent.message.end_time_unix_nano + SLACK_NS, span.name


async def test_a_request_is_one_trace_through_five_processes(hosts: TwoHosts, collector: Collector) -> None:
    trace_id, caller = os.urandom(16).hex(), os.urandom(8).hex()
    headers = {"traceparent": f"00-{trace_id}-{caller}-01", "tracestate": "vendor=1", "x-request-id": "told"}
    body: dict[str, Any] = {"prompt": "a fox that nobody else has told of " * 4, "max_tokens": 6, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=60) as client:
        reply = await client.post(f"http://{hosts.http}/v1/completions", json=body, headers=headers)
    usage = reply.json()["usage"]
    spans = await whole(collector, trace_id, set(PARENTS))
    assert_is_tree(spans)
    assert len({(span.service, span.instance) for span in spans}) == 5
    assert {span.service.removeprefix("looseleaf-") for span in spans} == {
        "gateway",
        "prefill",
        "decode",
        "block_store",
    }
    [root] = [span for span in spans if span.name == PARENTS["attempt"]]
    assert root.message.parent_span_id.hex() == caller and root.message.trace_state == "vendor=1"
    named = {span.name: span for span in spans}
    # The gateway may act on a message of prefill before the span of that call ends.
    order = [named[name].message for name in ("ledger.hand_over", "pull", "decode")]
    assert all(a.end_time_unix_nano <= b.start_time_unix_nano + SLACK_NS for a, b in pairwise(order))
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "tiny-llama",
        "gen_ai.response.id": "told",
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.response.finish_reasons": ["length"],
    }
    assert root.attributes | expected == root.attributes
    assert named["decode.run"].attributes["looseleaf.steps"] == 5, "prefill draws the first of six tokens"
    assert named["pull"].attributes["looseleaf.pulled.blocks"] > 0
    assert "a fox" not in str(spans), "no text of the prompt is exported"


async def ask(
    hosts: TwoHosts, trace_id: str, max_tokens: int, *, flags: str = "01", on_token: Callable[[int], None] = bool
) -> tuple[int, ...]:
    """Sends a request over gRPC, below a span of the caller. Calls `on_token` with the number of tokens so far."""
    tokens: list[int] = []
    [prompt] = prompts(1, seed=81, lengths=(40, 40))
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=prompt),
        sampling=types_pb2.SamplingParams(temperature=0.0),
        stopping=types_pb2.StoppingParams(max_tokens=max_tokens, ignore_eos=True),
        cache=pb.CacheOptions(cache_salt=trace_id),
    )
    metadata = (("traceparent", f"00-{trace_id}-{os.urandom(8).hex()}-{flags}"), ("x-request-id", f"r-{trace_id}"))
    async with grpc.aio.insecure_channel(hosts.grpc) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        async for response in stub.Generate(request, metadata=metadata, timeout=120):
            tokens += response.token_ids
            on_token(len(tokens))
    return tuple(tokens)


async def test_over_grpc_a_callers_trace_continues_unless_the_caller_does_not_record_it(
    hosts: TwoHosts, collector: Collector
) -> None:
    quiet, loud = os.urandom(16).hex(), os.urandom(16).hex()
    assert await ask(hosts, quiet, 4, flags="00") == await ask(hosts, loud, 4)
    assert_is_tree(await whole(collector, loud, set(PARENTS)))
    assert collector.trace(quiet) == []


async def ask_killed(hosts: TwoHosts, trace_id: str) -> tuple[int, ...]:
    """Sends a request, and kills decode after the first tokens."""
    victim = hosts.processes["decode-b"]

    def kill(num_tokens: int) -> None:
        if num_tokens >= 5 and hosts.processes["decode-b"] is victim:
            victim.send(signal.SIGKILL)
            hosts.start("decode-b")

    return await ask(hosts, trace_id, 300, on_token=kill)


async def test_a_killed_decode_worker_is_another_attempt_in_the_same_trace(
    hosts: TwoHosts, collector: Collector
) -> None:
    expected = await ask(hosts, os.urandom(16).hex(), 300)
    for _ in range(10):
        killed = os.urandom(16).hex()
        assert await ask_killed(hosts, killed) == expected
        # On a busy machine, decode may have sent all tokens when the kill arrives, and takes its spans with it.
        spans = await whole(collector, killed, {"attempt"}, "looseleaf-decode")
        if [span.name for span in spans].count("attempt") > 1:
            break
    spans = await whole(collector, killed, set(PARENTS), "looseleaf-decode")
    assert_is_tree(spans)
    attempts = [span for span in spans if span.name == "attempt"]
    first, last = attempts[0], attempts[-1]  # others, in between, found the successor not ready yet
    assert len(attempts) >= 2 and all(span.is_error for span in attempts[:-1])
    assert first.is_error and first.attributes["error.type"] == first.attributes["looseleaf.attempt.end"] != "done"
    assert not last.is_error and last.attributes["looseleaf.attempt.end"] == "done"
    assert first.attributes["looseleaf.attempt.output_tokens"] >= 5
    [root] = [span for span in spans if span.name == PARENTS["attempt"]]
    assert not root.is_error and root.attributes["looseleaf.attempts"] == len(attempts)
    parents = [span.message.parent_span_id for span in spans if span.name == "decode"]
    assert parents == [last.message.span_id], "the killed worker could not export its spans"
    for name in ("gateway-a", "prefill-a"):
        lines = [json.loads(line) for line in hosts.log(name).splitlines()]
        assert {line["trace_id"] for line in lines if line.get("request_id") == f"r-{killed}"} == {killed}, name


async def test_a_dead_collector_costs_its_spans_and_one_warning(hosts: TwoHosts, collector: Collector) -> None:
    def num_dropped() -> float:
        samples = metrics_page.read(hosts.http)
        return sum(
            s.value for s in samples if s.name == "looseleaf_fallbacks" and s.labels["fallback"] == "spans_dropped"
        )

    def warnings() -> list[str]:
        return [line for line in hosts.log("gateway-a").splitlines() if '"logger": "traces"' in line]

    expected, before = await ask(hosts, os.urandom(16).hex(), 12), len(warnings())
    collector.stop()
    for _ in range(2):
        now = num_dropped()
        assert await ask(hosts, os.urandom(16).hex(), 12) == expected
        await asyncio.to_thread(wait_for, num_dropped, lambda count, now=now: count > now, WAIT_S, "not counted")
    assert len(warnings()) == before + 1
    collector.start()
    for _ in range(20):  # a channel that has just failed waits before it connects again
        back = os.urandom(16).hex()
        assert await ask(hosts, back, 12) == expected
        await asyncio.sleep(1)
        if PARENTS.keys() <= {span.name for span in collector.trace(back)}:
            break
    assert_is_tree(await whole(collector, back, set(PARENTS)))
