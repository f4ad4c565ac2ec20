"""`looseleaf simulate TRACE`: predicts the latencies of a trace, or the number of workers that the trace needs. The
schedulers, the admission and the router are the real ones; the times of steps were measured.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator
from pydantic_settings import CliPositionalArg

from common.errors import StartupError
from common.settings import MAX_ITL, Settings, settings_config
from gateway.fleet.sharing import Targets
from looseleaf.serve.model_source import resolve
from looseleaf.serve.placement import is_small
from looseleaf.simulation import costs as cost_files
from looseleaf.simulation import trace
from looseleaf.simulation.costs import Costs
from looseleaf.simulation.fleet import FleetOptions, simulate
from looseleaf.simulation.report import Slo, Summary, Trial, plan
from looseleaf.simulation.worker import WorkerOptions

AUTO = "auto"
_WORKERS = r"(?:(\d+)p(\d+)d|(\d+)b)"


class SimulateSettings(Settings):
    """Flags of `looseleaf simulate`, which replays a trace through the real schedulers and router in virtual time."""

    model_config = settings_config("LOOSELEAF_SIMULATE_", "looseleaf simulate")

    trace: CliPositionalArg[Path | None] = Field(
        None, description="trace in Mooncake's (JSON lines) or Azure's (CSV) format"
    )
    model: str | None = Field(None, description="model directory or name for --fit; default: the built-in model")
    costs: Path | None = Field(None, description="file with measured times; with --fit, it is written")
    fit: bool = Field(False, description="measure the times on this machine first, with a server of its own")
    load_format: str = Field("auto", pattern="^(auto|dummy)$", description="dummy: random weights for --fit")
    workers: str = Field(
        "1p1d",
        description="workers of each host, such as 2p4d, or 4b for processes with both roles; auto: the fewest prefill "
        "and decode workers that meet the SLO",
    )
    disaggregation: Literal["auto", "never"] = Field(
        "auto",
        description="auto: a prompt is computed in the process that decodes it or in another one, as predicted times "
        "decide; never: in the process that decodes it",
    )
    hosts: int = Field(1, ge=1, le=1000, description="number of hosts, each with an arena")
    turns: bool = Field(False, description="workers of a host take turns on the same cores")
    slo_ttft: float | None = Field(None, gt=0, description="limit on the time to first token, in seconds")
    slo_tpot: float | None = Field(None, gt=0, description="limit on the mean time per later token, in seconds")
    slo_share: float = Field(0.9, gt=0, le=1, description="share of the requests that must meet the limits")
    max_workers: int = Field(8, ge=2, le=64, description="most workers per host that --workers auto tries")
    requests: int | None = Field(None, ge=1, description="number of requests to take from the trace; default: all")
    rate: float | None = Field(None, gt=0, description="mean number of requests per second; default: the trace's")
    divide: float = Field(1.0, ge=1, description="divide all lengths of the trace by this number")
    link_gbit: float = Field(10.0, gt=0, description="Gbit/s of the links between hosts")
    num_blocks: int = Field(8192, ge=1, description="blocks of each host's arena")
    block_size: int = Field(16, ge=1, le=256)
    max_model_len: int = Field(8192, ge=2, description="length of the longest sequence in tokens")
    max_num_seqs: int = Field(64, ge=1, le=4096)
    max_num_batched_tokens: int = Field(512, ge=1, le=1 << 20)
    max_itl: float | None = Field(None, ge=0, description=MAX_ITL)
    max_queue: int = Field(256, ge=1, le=100_000, description="the gateway's limit on sequences at once")
    max_queue_wait: float = Field(10.0, ge=0, description="the gateway's limit on the predicted wait, in seconds")
    json_output: bool = Field(False, description="print one JSON object")

    @field_validator("workers")
    @classmethod
    def _counts(cls, given: str) -> str:
        found = re.fullmatch(_WORKERS, given)
        if given != AUTO and (found is None or not all(1 <= int(count or 1) <= 64 for count in found.groups())):
            raise ValueError("must be auto, or numbers from 1 to 64 as in 2p4d or 4b")
        return given


def run(argv: Sequence[str]) -> int:
    """Fits or reads the costs, and prints the prediction. Returns 1 if no number of workers that --workers auto tries
    meets the SLO, otherwise 0.
    """
    settings = SimulateSettings.load(argv)
    if settings.disaggregation == "never" and not settings.workers.endswith("b"):
        raise StartupError("--disaggregation never needs processes with both roles, as in --workers 4b")
    costs = _costs(settings)
    if settings.trace is None:
        return 0
    requests = trace.read(settings.trace, count=settings.requests, divisor=settings.divide, rate=settings.rate)
    slo = Slo(settings.slo_ttft or float("inf"), settings.slo_tpot or float("inf"), settings.slo_share)
    if settings.workers == AUTO:
        if settings.slo_ttft is None and settings.slo_tpot is None:
            raise StartupError("--workers auto needs --slo-ttft or --slo-tpot")
        trials = list(plan(requests, costs, options_of(settings), slo, settings.max_workers))
    else:
        options = options_of(settings)
        outcomes = simulate(requests, costs, options)
        attained, summary = slo.attained(outcomes), Summary.of(outcomes)
        trials = [Trial(options.prefill, options.decode, attained, summary, options.both)]
    best = max(trials, key=lambda trial: (trial.attained >= slo.share, trial.attained))
    _show(settings, trials, best, len(requests))
    return int(settings.workers == AUTO and best.attained < slo.share)


def options_of(settings: SimulateSettings) -> FleetOptions:
    found = re.fullmatch(_WORKERS, settings.workers)
    prefill, decode, both = (1, 1, 0) if found is None else (int(count or 0) for count in found.groups())
    workers = WorkerOptions(
        settings.block_size, settings.num_blocks, settings.max_model_len, settings.max_num_seqs,
        settings.max_num_batched_tokens, None if settings.max_itl is None else settings.max_itl / 1e3,
    )  # fmt: skip
    return FleetOptions(
        settings.hosts, prefill, decode, settings.turns, settings.link_gbit * 1e9 / 8,
        max_queue=settings.max_queue, max_queue_wait_s=settings.max_queue_wait, workers=workers,
        both=both, targets=Targets(settings.slo_ttft or math.inf, settings.slo_tpot or math.inf),
        disaggregates=settings.disaggregation == "auto",
    )  # fmt: skip


def _costs(settings: SimulateSettings) -> Costs:
    if settings.fit:
        found = measure(settings)
        if settings.costs is not None:
            found.save(settings.costs)
        return found
    if settings.costs is None:
        raise StartupError("give the measured times with --costs FILE, or measure them with --fit")
    found = cost_files.load(settings.costs)
    if settings.model is not None and Path(settings.model).name != found.model:
        raise StartupError(f"--costs {settings.costs}: measured {found.model}, not --model {settings.model}")
    return found


def measure(settings: SimulateSettings) -> Costs:
    """Returns the costs of a server that it starts on this machine, measures and ends. Raises StartupError if
    `--max-model-len` or the model's limit is too small for the measurement.
    """
    from engine.config import ModelConfig
    from looseleaf.simulation import replay

    dummy = settings.load_format == "dummy"
    directory = resolve(settings.model, dummy=dummy).directory
    config = ModelConfig.from_directory(directory)
    longest = min(settings.max_model_len, config.max_model_len, 1024) // 512 * 512 or 512
    room = longest + replay.OUTPUT + max(replay.BATCHES)
    if room > (limit := min(settings.max_model_len, config.max_model_len)):
        longest = limit - replay.OUTPUT - max(replay.BATCHES)
    if longest < max(replay.PREFILL_LENS):
        raise StartupError(f"--max-model-len: --fit needs sequences of {max(replay.PREFILL_LENS) + 56} tokens")
    kv_bytes = replay.kv_bytes_per_token(directory)
    with replay.launch(settings.model, limit, 4096, settings.block_size, dummy=dummy) as llm:
        fitted = replay.fit(llm.addresses.grpc, directory.name, kv_bytes, config.vocab_size, longest)
        return replace(asyncio.run(fitted), turns=is_small())


def _show(settings: SimulateSettings, trials: Sequence[Trial], best: Trial, num_requests: int) -> None:
    if settings.json_output:
        rows: list[dict[str, Any]] = [_row(trial) for trial in trials]
        print(json.dumps({"requests": num_requests, "hosts": settings.hosts, "trials": rows, "best": _row(best)}))
        return
    print("\n".join(_lines(settings, trials, best, num_requests)))


def _lines(settings: SimulateSettings, trials: Sequence[Trial], best: Trial, num_requests: int) -> Iterator[str]:
    hosts = f"{settings.hosts} host{'s' * (settings.hosts > 1)}"
    yield f"{num_requests:,} requests, {hosts}; times in ms"
    yield "workers   TTFT p50      p99   ITL p50      p99    tokens/s  refused  within SLO"
    for trial in trials:
        s = trial.summary
        times = f"{1e3 * s.ttft_p50:9.1f} {1e3 * s.ttft_p99:8.1f} {1e3 * s.itl_p50:9.2f} {1e3 * s.itl_p99:8.2f}"
        yield f"{trial.workers:8} {times} {s.tokens_per_s:11.1f} {s.num_refused:8} {trial.attained:11.1%}"
    if settings.workers == AUTO:
        met = best.attained >= settings.slo_share
        answer = (
            f"{best.prefill} prefill and {best.decode} decode workers" if met else f"more than {settings.max_workers}"
        )
        yield f"needed per host: {answer}"


def _row(trial: Trial) -> dict[str, Any]:
    s = trial.summary
    row = {
        "workers": trial.workers, "attained": trial.attained, "ttft_p50_s": s.ttft_p50,
        "ttft_p99_s": s.ttft_p99, "itl_p50_s": s.itl_p50, "itl_p99_s": s.itl_p99, "tokens_per_s": s.tokens_per_s,
        "refused": s.num_refused,
    }  # fmt: skip
    return {name: None if value != value else value for name, value in row.items()}  # JSON has no NaN
