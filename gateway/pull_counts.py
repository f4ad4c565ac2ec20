"""Counts copies of blocks between hosts, for /metrics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge

from protos.v1 import block_store_pb2

EARLY_ENDS = ("copied", "stopped", "no_room", "failed")
"""How an early pull ends: its blocks have arrived, its request has ended it before, the destination has too little
room, or it has failed.
"""


class PullCounts:
    """The metrics of pulls."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"looseleaf_{name}", text, ["model_name", *labels], registry=registry)

        self._pulls = counter("pulls", "Tickets whose blocks were copied to another host").labels(model_name)
        self._blocks = counter("pulled_blocks", "Blocks copied between hosts").labels(model_name)
        self._bytes = counter("pulled_bytes", "Bytes of blocks copied between hosts").labels(model_name)
        text = "Tokens whose KV was copied to another host before their prompt was computed"
        self._early_tokens = counter("early_pulled_tokens", text).labels(model_name)
        text = "Copies of blocks to another host that began before their prompt was computed"
        early = counter("early_pulls", text, "end")
        self._early = {end: early.labels(model_name, end) for end in EARLY_ENDS}
        text = "Early pulls that are copying blocks"
        self._copying = Gauge("looseleaf_early_pulls_copying", text, ["model_name"], registry=registry).labels(
            model_name
        )

    def pulled(self, pulled: block_store_pb2.PullResponse) -> None:
        self._pulls.inc()
        self._blocks.inc(pulled.num_pulled)
        self._bytes.inc(pulled.num_bytes)
        self._early_tokens.inc(pulled.num_early_tokens)

    def early(self, end: str) -> None:
        """Counts an early pull. `end` is one of EARLY_ENDS."""
        self._early[end].inc()

    @contextmanager
    def copying_early(self) -> Iterator[None]:
        """Counts an early pull as copying for the duration of the `with` statement."""
        with self._copying.track_inprogress():
            yield
