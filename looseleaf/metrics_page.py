"""Reads and parses the metrics page of a gateway (/metrics)."""

from __future__ import annotations

import ssl
import urllib.request
from collections.abc import Sequence

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

TIMEOUT_S = 30.0


def read(http_address: str, tls: ssl.SSLContext | None = None) -> list[Sample]:
    """Returns the current samples of the gateway at this host:port, over HTTPS if `tls` is given. Raises OSError if the
    gateway does not answer.
    """
    url = f"http{'' if tls is None else 's'}://{http_address}/metrics"
    with urllib.request.urlopen(url, timeout=TIMEOUT_S, context=tls) as reply:
        return parse(reply.read().decode())


def parse(text: str) -> list[Sample]:
    """Returns the samples in the text of a metrics page."""
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def total(samples: Sequence[Sample], name: str, **labels: str) -> float:
    """Returns the sum of the samples with this name and these labels. A sample may have further labels."""
    wanted = labels.items()
    return sum(sample.value for sample in samples if sample.name == name and wanted <= sample.labels.items())
