"""The gateway's Prometheus metrics. Their names begin with looseleaf_, and the metrics in `VLLM_NAMES` appear under
vLLM's names as well. Tokens are counted on the hot path, so they have a faster collector (`token_tally`).

The time to first token is measured from `RequestState.begin`, before the wait at the gate, until the first token is
sent to the client. Inter-token latency is the time between two consecutive messages of a sample, divided by the number
of tokens in the second message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from common.errors import BY_GRPC_CODE
from common.types import DraftCounts
from gateway.admission.admission import Reason
from gateway.draft_counts import DraftCollector
from gateway.fleet.block_counts import BlockCounts
from gateway.pull_counts import PullCounts
from gateway.request.delta import Summary
from gateway.token_tally import TokenTally

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)
_LENGTHS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)

OUTCOMES = ("stop", "length", "abort", "error")
"""The outcomes of admitted requests. "abort" means that the request was cancelled, and "error" that it failed."""
VLLM_NAMES = {
    "looseleaf_requests_running": "vllm:num_requests_running",
    "looseleaf_requests_waiting": "vllm:num_requests_waiting",
    "looseleaf_kv_cache_usage_ratio": "vllm:kv_cache_usage_perc",
    "looseleaf_prefix_cache_queries": "vllm:prefix_cache_queries",
    "looseleaf_prefix_cache_hits": "vllm:prefix_cache_hits",
    "looseleaf_prompt_tokens": "vllm:prompt_tokens",
    "looseleaf_generation_tokens": "vllm:generation_tokens",
    "looseleaf_requests_given_back": "vllm:num_preemptions",
    "looseleaf_requests_ended": "vllm:request_success",
    "looseleaf_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "looseleaf_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "looseleaf_e2e_request_latency_seconds": "vllm:e2e_request_latency_seconds",
    "looseleaf_request_queue_time_seconds": "vllm:request_queue_time_seconds",
    "looseleaf_request_prefill_time_seconds": "vllm:request_prefill_time_seconds",
    "looseleaf_request_decode_time_seconds": "vllm:request_decode_time_seconds",
    "looseleaf_request_prompt_tokens": "vllm:request_prompt_tokens",
    "looseleaf_request_generation_tokens": "vllm:request_generation_tokens",
    "looseleaf_spec_decode_num_drafts": "vllm:spec_decode_num_drafts",
    "looseleaf_spec_decode_num_draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "looseleaf_spec_decode_num_accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
    "looseleaf_spec_decode_num_accepted_tokens_per_pos": "vllm:spec_decode_num_accepted_tokens_per_pos",
}


class _Aliased(Collector):
    """A collector of a registry's metrics. It repeats each metric in `names` under the name that `names` maps it to."""

    def __init__(self, inner: CollectorRegistry, names: Mapping[str, str]) -> None:
        self._inner = inner
        self._names = names

    def collect(self) -> Iterator[Metric]:
        for metric in self._inner.collect():
            yield _renamed(metric, metric.name)
            if (name := self._names.get(metric.name)) is not None:
                yield _renamed(metric, name)


def _renamed(metric: Metric, name: str) -> Metric:
    """Returns a copy of a metric under `name`, without the creation times that prometheus_client adds to its series."""
    copy = Metric(name, metric.documentation, metric.type)
    cut = len(metric.name)
    for sample in metric.samples:
        if sample.name.endswith("_created"):
            continue
        copy.samples.append(Sample(name + sample.name[cut:], sample.labels, sample.value))
    return copy


class Metrics:
    """The gateway's Prometheus metrics."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._outer = CollectorRegistry()
        self._outer.register(_Aliased(self._registry, VLLM_NAMES))
        self.model_name = model_name
        self._running = self._gauge("requests_running", "Requests that workers are processing")
        self._waiting = self._gauge("requests_waiting", "Requests that are waiting in the gateway")
        self._kv_usage = self._gauge("kv_cache_usage_ratio", "Share of blocks that are neither free nor cached, 0 to 1")
        self._queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self._hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache")
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of requests that got an answer")
        self._tally = TokenTally(model_name, _TOKEN_SECONDS)
        self._registry.register(self._tally)
        self.next_tokens = self._tally.add
        self._drafts = DraftCollector(model_name)
        self._registry.register(self._drafts)
        self._given_back = self._counter("requests_given_back", "Requests preempted by decode and prefilled again")
        self._hand_overs = self._counter("hand_overs", "Tickets submitted to decode workers")
        self._handed_tokens = self._counter("handed_over_tokens", "Token positions handed from prefill to decode")
        self.pulls = PullCounts(self._registry, model_name)
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "Time from when a request was read and checked to its first token", _SECONDS
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "Time from when a request was read and checked to its end", _SECONDS
        )
        self._queue = self._histogram("request_queue_time_seconds", "Time spent waiting for prefill", _SECONDS)
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "Time from the first prefill step to the first token", _SECONDS
        )
        self._hand_over = self._histogram(
            "request_hand_over_time_seconds", "Time from the first token to the claim by decode", _SECONDS
        )
        self._decode = self._histogram("request_decode_time_seconds", "Time from the claim to the last token", _SECONDS)
        self._prompt_len = self._histogram("request_prompt_tokens", "Prompt length in tokens", _LENGTHS)
        self._output_len = self._histogram("request_generation_tokens", "Tokens produced by a request", _LENGTHS)
        self._attempts = self._histogram("request_attempts", "Prefills of a request", (1, 2, 3, 5, 10))
        labels = ["model_name"]
        self._ended = Counter(
            "looseleaf_requests_ended",
            "Requests that have ended, by finish reason",
            [*labels, "finished_reason"],
            registry=self._registry,
        )
        self._refused = Counter(
            "looseleaf_requests_failed",
            "Requests that have failed, by status",
            [*labels, "code"],
            registry=self._registry,
        )
        self._not_let_in = Counter(
            "looseleaf_requests_refused",
            "Requests that were refused, by reason",
            [*labels, "reason"],
            registry=self._registry,
        )
        self._begin_at_zero()
        self._wait = self._gauge("predicted_wait_seconds", "Predicted wait of a request that arrives now; 0 if unknown")
        self._retries = Counter(
            "looseleaf_requests_retried",
            "Attempts that were lost, by reason",
            [*labels, "reason"],
            registry=self._registry,
        )
        self._blocks = Gauge(
            "looseleaf_blocks", "Blocks of all arenas by state", [*labels, "state"], registry=self._registry
        )
        self._block_bytes = Gauge(
            "looseleaf_block_bytes",
            "Bytes of a block, by the type of its keys and values",
            [*labels, "kv_dtype", "block_size"],
            registry=self._registry,
        )
        self._dispatched = Counter(
            "looseleaf_worker_requests",
            "Requests sent to a worker",
            [*labels, "role", "worker"],
            registry=self._registry,
        )
        worker_labels = [*labels, "worker", "role"]
        self._batch = Gauge(
            "looseleaf_worker_running", "Sequences in a worker's batch", worker_labels, registry=self._registry
        )
        self._queued = Gauge(
            "looseleaf_worker_waiting", "Sequences queued by a worker", worker_labels, registry=self._registry
        )
        self._fallbacks = Gauge(
            "looseleaf_fallbacks",
            "Number of times that a process has used a fallback instead of its normal path",
            [*labels, "service", "fallback"],
            registry=self._registry,
        )

    def _begin_at_zero(self) -> None:
        """Creates the series of all outcomes, codes and reasons, so that Prometheus sees them at 0 before an event."""
        for outcome in OUTCOMES:
            self._ended.labels(self.model_name, outcome)
        for code in BY_GRPC_CODE:
            self._refused.labels(self.model_name, code)
        for reason in Reason:
            self._not_let_in.labels(self.model_name, reason)

    def first_token(self, latency_s: float, summary: Summary) -> None:
        """Records the time to first token of a request, and counts the first token and the prompt's tokens."""
        self._ttft.observe(latency_s)
        self.prompt_done(summary)
        self._tally.num_tokens += 1

    def prompt_done(self, summary: Summary) -> None:
        """Counts the tokens of a prompt that has been prefilled, and the cached tokens among them."""
        self._prompt.inc(summary.prompt_tokens)
        self._queries.inc(summary.prompt_tokens)
        self._hits.inc(summary.sources.cached)

    def tokens(self, count: int) -> None:
        """Counts tokens that have no inter-token latency, because they are in a sample's first message."""
        self._tally.num_tokens += count

    def dispatched(self, role: str, worker: str) -> None:
        """Counts a request that has been sent to a worker."""
        self._dispatched.labels(self.model_name, role, worker).inc()

    def handed_over(self, num_tokens: int) -> None:
        self._hand_overs.inc()
        self._handed_tokens.inc(num_tokens)

    def retried(self, reason: str) -> None:
        """Counts a lost attempt under the reason for the loss."""
        self._retries.labels(self.model_name, reason).inc()
        if reason == "given_back":
            self._given_back.inc()

    def failed(self, code: str) -> None:
        """Counts a request that was refused or that failed, under its gRPC code."""
        self._refused.labels(self.model_name, code).inc()

    def refused(self, reason: str) -> None:
        """Counts a request that was not admitted. `reason` is one of `admission.Reason`. Tenants are not labels,
        because the metrics can be read without a key.
        """
        self._not_let_in.labels(self.model_name, reason).inc()

    def ended(self, outcome: str, latency_s: float, summary: Summary) -> None:
        """Records an ended request. `outcome` is one of `OUTCOMES`. Only "stop" and "length" add to the phase times."""
        self._ended.labels(self.model_name, outcome).inc()
        self._e2e.observe(latency_s)
        self._attempts.observe(summary.attempts)
        self._prompt_len.observe(summary.prompt_tokens)
        self._output_len.observe(summary.completion_tokens)
        if outcome in ("stop", "length"):
            times = summary.timings
            self._queue.observe(times.queue_ns / 1e9)
            self._prefill.observe(times.prefill_ns / 1e9)
            self._hand_over.observe(times.hand_over_ns / 1e9)
            self._decode.observe(times.decode_ns / 1e9)

    def watch_queues(
        self, running: Callable[[], float], waiting: Callable[[], float], wait_s: Callable[[], float]
    ) -> None:
        """Sets the functions that each scrape calls for the queue lengths and the predicted wait in seconds."""
        self._wait.set_function(wait_s)
        self._running.set_function(running)
        self._waiting.set_function(waiting)

    def set_blocks(self, counts: BlockCounts) -> None:
        """Sets the gauges of blocks. Has no effect if `counts.by_state` is empty."""
        blocks = counts.by_state
        if not blocks:
            return
        for state, count in blocks.items():
            self._blocks.labels(self.model_name, state).set(count)
        used = blocks["reserved"] + blocks["sealed"] + blocks["quarantine"]
        self._kv_usage.set(used / max(1, sum(blocks.values())))
        if counts.block_bytes:
            labels = self.model_name, counts.kv_dtype, str(counts.block_size)
            self._block_bytes.labels(*labels).set(counts.block_bytes)

    def set_workers(self, loads: Iterable[tuple[str, str, int, int]]) -> None:
        """Sets the gauges of all workers. `loads` has one tuple (worker, role, running, waiting) for each worker.
        Removes the series of other workers.
        """
        self._batch.clear()
        self._queued.clear()
        for worker, role, running, waiting in loads:
            self._batch.labels(self.model_name, worker, role).set(running)
            self._queued.labels(self.model_name, worker, role).set(waiting)

    def set_drafts(self, by_worker: Mapping[str, DraftCounts]) -> None:
        """Sets the draft counts of all workers that speculate. Removes the series of other workers."""
        self._drafts.by_worker = by_worker

    def set_fallbacks(self, by_service: Mapping[str, Mapping[str, int]]) -> None:
        """Sets the fallback counts of all services, by service and fallback. Removes all other series."""
        self._fallbacks.clear()
        for service, counts in by_service.items():
            for name, count in counts.items():
                self._fallbacks.labels(self.model_name, service, name).set(count)

    def render(self) -> bytes:
        """Returns the text of /metrics."""
        return bytes(generate_latest(self._outer))

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"looseleaf_{name}", text, ["model_name"], registry=self._registry).labels(self.model_name)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"looseleaf_{name}", text, ["model_name"], registry=self._registry).labels(self.model_name)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        metric = Histogram(f"looseleaf_{name}", text, ["model_name"], buckets=buckets, registry=self._registry)
        return metric.labels(self.model_name)
