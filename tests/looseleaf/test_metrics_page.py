"""Parsing of a gateway's /metrics."""

from __future__ import annotations

from looseleaf import LLM, metrics_page


def test_what_was_generated_is_read_by_name_and_label() -> None:
    with LLM() as llm:
        llm.generate(["Once upon a time", "The wolf"], max_tokens=5, ignore_eos=True)
        samples = metrics_page.read(llm.addresses.http)
        by_worker = llm.requests_by_worker()
    assert metrics_page.total(samples, "looseleaf_generation_tokens_total") == 10
    assert metrics_page.total(samples, "looseleaf_worker_requests_total", role="decode") == 2
    assert metrics_page.total(samples, "looseleaf_worker_requests_total", role="nobody") == 0
    assert sum(by_worker.values()) == 4
