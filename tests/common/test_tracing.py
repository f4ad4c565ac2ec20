"""Traces: W3C contexts, the variables that turn them on, and the SDK with a real collector and without one."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.errors import StartupError
from common.otlp import OtlpTracer, otlp_tracer
from common.tracing import (
    CURRENT,
    ENDPOINTS,
    NO_CONTEXT,
    NO_TRACER,
    SHORTEST_WAIT_NS,
    TraceContext,
    is_wanted,
    traced,
    tracer_of,
)
from testing.collector import Collector
from testing.system import wait_for

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
DEAD = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ENDPOINTS, "OTEL_SDK_DISABLED", "OTEL_SERVICE_NAME", "OTEL_TRACES_SAMPLER"):
        monkeypatch.delenv(name, raising=False)


def test_a_callers_context_is_read_from_headers_and_metadata() -> None:
    expected = TraceContext(PARENT, "a=b")
    assert TraceContext.of_headers([("x", "y"), ("traceparent", PARENT), ("tracestate", "a=b")]) == expected
    assert TraceContext.of_headers([(b"tracestate", b"a=b"), (b"traceparent", PARENT.encode())]) == expected
    assert expected.trace_id == TRACE and dict(expected.metadata) == {"traceparent": PARENT, "tracestate": "a=b"}
    assert TraceContext.of(PARENT, "a" * 513) == TraceContext.of(PARENT, "a=\n") == TraceContext(PARENT)


@pytest.mark.parametrize(
    "given",
    ["", "00", PARENT.upper(), PARENT + "-", PARENT.replace(TRACE, "0" * 32), "ff" + PARENT[2:], PARENT + "\n"],
)
def test_an_invalid_context_is_ignored(given: str) -> None:
    assert TraceContext.of(given, "a=b") == NO_CONTEXT and not NO_CONTEXT.metadata


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, False),
        ({ENDPOINT: DEAD}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": DEAD}, True),
        ({ENDPOINT: ""}, False),
        ({ENDPOINT: DEAD, "OTEL_SDK_DISABLED": "true"}, False),
        ({ENDPOINT: DEAD, "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_the_standard_variables_turn_traces_on(variables: dict[str, str], wanted: bool) -> None:
    assert is_wanted(variables) is wanted


def test_a_base_install_loads_nothing_and_names_the_missing_extra() -> None:
    program = f"""
import os, sys
sys.modules["opentelemetry"] = None  # as if it were not installed
import gateway.__main__, common.tracing
assert common.tracing.tracer_of("gateway") is common.tracing.NO_TRACER
os.environ["{ENDPOINT}"] = "{DEAD}"
common.tracing.tracer_of("gateway")
"""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False)
    assert f"StartupError: {ENDPOINT} asks for traces" in done.stderr and "looseleaf[traces]" in done.stderr


@pytest.mark.parametrize("size", ["abc", "0", "-1", "1.5"])
def test_an_invalid_size_of_the_queue_is_named(monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    monkeypatch.setenv(ENDPOINT, DEAD)
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", size)
    with pytest.raises(StartupError, match=f"OTEL_BSP_MAX_QUEUE_SIZE must be an integer of at least 1, got '{size}'"):
        otlp_tracer("gateway", "a:1")


@pytest.mark.parametrize("variable", ["OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"])
def test_an_unknown_protocol_is_refused(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(ENDPOINT, DEAD)
    monkeypatch.setenv(variable, "http/json")
    with pytest.raises(StartupError, match=f"{variable} is 'http/json'"):
        tracer_of("gateway")


def test_without_a_collector_spans_pass_the_callers_context_on() -> None:
    CURRENT.set(TraceContext(PARENT))
    span = NO_TRACER.begin("request", 1, CURRENT.get()).child("attempt", 2)
    span.add("wait", 1, 2)
    span.end(3, "LOST")
    assert span.context.traceparent == PARENT and not span.is_recording
    CURRENT.set(NO_CONTEXT)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Collector:
    with Collector() as running:
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        yield running


def test_spans_reach_the_collector_with_their_times_parents_and_errors(collector: Collector) -> None:
    tracer = tracer_of("prefill", "prefill-0")
    now, unix = time.monotonic_ns(), time.time_ns()
    root = tracer.begin("request", now - 3_000_000, TraceContext(PARENT, "a=b"))
    attempt = root.child("attempt", now - 2_000_000)
    attempt.add("long", now - 1_500_000, now - 500_000, {"n": 2, "names": ["x", "y"]}, kind="client")
    attempt.add_wait("short", now, now + SHORTEST_WAIT_NS - 1)
    attempt.event("swapped", now - 1_500_000)
    attempt.end(now, "LOST")
    attempt.end(now + 9, "AGAIN")
    root.end(now)
    tracer.close()
    first, second, third = collector.trace(TRACE)
    assert [first.name, second.name, third.name] == ["request", "attempt", "long"]
    assert (first.service, first.instance) == ("looseleaf-prefill", "prefill-0")
    assert first.message.parent_span_id.hex() == PARENT.split("-")[2] and first.message.trace_state == "a=b"
    assert second.message.parent_span_id == first.message.span_id
    assert third.message.parent_span_id == second.message.span_id
    assert second.is_error and second.attributes == {"error.type": "LOST"} and not first.is_error
    assert third.attributes == {"n": 2, "names": ["x", "y"]} and second.message.events[0].name == "swapped"
    assert third.message.end_time_unix_nano - third.message.start_time_unix_nano == 1_000_000
    assert abs(int(second.message.end_time_unix_nano) - unix) < 1_000_000_000


def test_sampler_and_service_name_are_those_of_the_environment(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    tracer = tracer_of("gateway")
    for parent in (NO_CONTEXT, TraceContext(PARENT.removesuffix("1") + "0"), TraceContext(PARENT)):
        span = tracer.begin("request", 1, parent)
        assert int(span.context.traceparent[-2:], 16) & 1 == span.is_recording
        span.child("attempt", 1).end(2)
        span.end(2)
    tracer.close()
    assert [(span.service, span.trace_id) for span in collector.spans] == [("mine", TRACE)] * 2


def test_a_call_of_the_block_store_ends_with_its_status_and_gives_the_context_back(collector: Collector) -> None:
    tracer, caller = tracer_of("block_store"), TraceContext(PARENT)
    CURRENT.set(caller)
    with pytest.raises(StartupError), traced(tracer, "pull") as span:
        assert CURRENT.get() == span.context != caller
        raise StartupError("no")
    assert CURRENT.get() == caller
    CURRENT.set(NO_CONTEXT)
    tracer.close()
    assert collector.trace(TRACE)[0].attributes["error.type"] == "StartupError"


def test_without_an_answer_every_span_is_counted_and_the_outage_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {ENDPOINT: DEAD, "OTEL_EXPORTER_OTLP_TIMEOUT": "1", "OTEL_BSP_SCHEDULE_DELAY": "50"}
    for name, value in {**settings, "OTEL_BSP_MAX_QUEUE_SIZE": "8", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    tracer = otlp_tracer("gateway", "")
    assert isinstance(tracer, OtlpTracer)
    for number in range(50):
        tracer.begin("request", number, NO_CONTEXT).end(number + 1)
    wait_for(lambda: caplog.messages, bool, 60, "no warning")
    tracer.close()
    wait_for(lambda: tracer.num_dropped, lambda count: count == 50, 60, "not counted")
    assert [(r.name, r.levelno) for r in caplog.records if r.name != "asyncio"] == [("traces", logging.WARNING)]
