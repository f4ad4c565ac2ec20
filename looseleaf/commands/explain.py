"""`looseleaf explain [ID]`: shows the phases of a request, the workers that served it, and the predictions by which
they were chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from pydantic import Field
from pydantic_settings import CliPositionalArg

from common.settings import settings_config
from looseleaf.commands.options import ConnectionSettings
from looseleaf.explanation import AttemptExplanation, ConsideredWorker, Explanation, Phase

_BAR_CHARS = 40


class ExplainSettings(ConnectionSettings):
    """Flags of `looseleaf explain`, which explains the requests with an id or, without an id, lists recent requests."""

    model_config = settings_config("LOOSELEAF_CLIENT_", "looseleaf explain")

    request_id: CliPositionalArg[str | None] = Field(None, description="the id in the reply's x-request-id")
    limit: int = Field(20, ge=1, description="maximum number of requests to print")


def run(argv: Sequence[str]) -> int:
    settings = ExplainSettings.load(argv)
    with settings.client() as client:
        found = client.explain(settings.request_id, limit=settings.limit)
    for explanation in found:
        for line in [headline(explanation)] if settings.request_id is None else lines(explanation):
            print(line)
    return 0


def headline(told: Explanation) -> str:
    """Returns one line about a request."""
    usage = told.usage
    tokens = "" if usage is None else f", {usage.prompt_tokens} + {usage.completion_tokens} tokens"
    cached = f", {usage.cached_tokens} cached" if usage is not None and usage.cached_tokens else ""
    return f"{told.request_id}: {told.outcome} after {told.total_ns / 1e6:.1f} ms{tokens}{cached}"


def lines(told: Explanation) -> Iterator[str]:
    """Yields the lines of the report about a request."""
    yield headline(told)
    if told.error:
        yield f"  error: {told.error}"
    if told.first_token_ns is not None:
        yield f"  first token after {told.first_token_ns / 1e6:.1f} ms"
    for number, phases in groupby(told.phases, key=lambda phase: phase.attempt):
        if 0 < number <= len(told.attempts):
            yield from _attempt(number, told.attempts[number - 1])
        for phase in phases:
            yield _bar(phase, told.total_ns)


def _attempt(number: int, attempt: AttemptExplanation) -> Iterator[str]:
    sources = attempt.sources
    yield f"  attempt {number}: {attempt.end or 'running'}, {attempt.output_tokens} output tokens"
    yield f"    prefill on {_choice(attempt.prefill_worker, attempt.prefill_considered)}"
    yield f"      KV of {sources.cached} tokens found in the cache, of {sources.computed} computed"
    if not attempt.decode_worker:
        return
    moved = f", {sources.transferred} tokens copied to its arena" if sources.transferred else ""
    yield f"    decode on {_choice(attempt.decode_worker, attempt.decode_considered)}"
    yield f"      {attempt.handed_over_blocks} blocks handed over ({attempt.handed_over_tokens} tokens){moved}"
    if attempt.copied_blocks:
        yield f"      {attempt.copied_blocks} shared blocks copied on write"
    if attempt.num_swaps:
        times = f"{attempt.num_swaps} times: {attempt.swapped_out_blocks} blocks copied out"
        yield f"      swapped out {times}, {attempt.swapped_in_blocks} copied back"


def _choice(worker_id: str, considered: Sequence[ConsideredWorker]) -> str:
    """Returns a text with the worker and the predictions by which it was chosen."""
    return f"{worker_id} (predicted: {', '.join(map(_prediction, considered))})"


def _prediction(worker: ConsideredWorker) -> str:
    """Returns a text with the times until the request ends, that decoding sequences lose, and between tokens."""
    delay = f" + {worker.delay_s * 1e3:.1f} ms of delays" if worker.delay_s else ""
    itl = f", ITL {worker.itl_s * 1e3:.1f} ms" if worker.itl_s else ""
    return f"{worker.worker_id} {worker.predicted_s * 1e3:.1f} ms{delay}{itl}"


def _bar(phase: Phase, total_ns: int) -> str:
    share = phase.duration_ns / max(1, total_ns)
    name = phase.kind.replace("_", " ")
    return f"    {name:<14} {phase.duration_ns / 1e6:>10.2f} ms {'█' * round(share * _BAR_CHARS)}"
