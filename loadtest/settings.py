"""The settings of the load test. `python -m loadtest` and the locustfile have the same flags except for locust's."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from common.settings import Settings, settings_config
from loadtest.metrics import Slo

OF_LOCUST = ("users", "spawn_rate", "run_time", "http", "csv", "html", "processes", "web", "start_timeout_s")
"""Fields that are not flags of the locustfile: locust has its own flags for them, or they belong to the launcher."""


class LoadSettings(Settings):
    """Flags of `python -m loadtest`, which runs locust against a Looseleaf server. It starts a server for the run if
    none is running.
    """

    model_config = settings_config("LOOSELEAF_LOADTEST_", "loadtest")

    users: int = Field(
        32,
        ge=1,
        description="concurrent users, half of them over gRPC and half over HTTP; not used with --trace or --rate",
    )
    spawn_rate: float = Field(16.0, gt=0, description="users to start per second")
    run_time: str | None = Field(
        None,
        pattern=r"^(\d+[hms])+$",
        description="duration of the run, such as 60s or 1h30m; default: until the requests of a trace, of --requests "
        "or of steps have been answered, otherwise 60s",
    )
    http: str = Field("127.0.0.1:8000", description="host:port of the gateway's HTTP API")
    csv: str | None = Field(None, description="prefix of the CSV files that locust writes")
    html: str | None = Field(None, description="file for the HTML report")
    processes: int | None = Field(None, ge=1, le=64, description="number of processes that send requests; default: one")
    web: int | None = Field(None, ge=1, le=65535, description="port of locust's web page; default: no page")
    start_timeout_s: float = Field(600.0, gt=0, description="seconds to wait for a server that the run starts")

    grpc: str = Field("127.0.0.1:50051", description="host:port of the gateway's gRPC API")
    seed: int = Field(0, description="seed of lengths, prompts, sampling and arrivals")
    prompt_median: float = Field(96.0, gt=0, description="median prompt length in tokens; without --trace")
    output_median: float = Field(32.0, gt=0, description="median output length in tokens; without --trace")
    shared_share: float = Field(
        0.5, ge=0, le=1, description="share of the prompts with a common prefix; without --trace"
    )
    trace: Path | None = Field(
        None, description="replay a trace in Mooncake's (JSON lines) or Azure's (CSV) format at its own times"
    )
    rate: float | None = Field(
        None, gt=0, description="mean number of requests per second, sent without waiting for answers"
    )
    speed: float | None = Field(None, gt=0, description="replay the trace this many times as fast as it was recorded")
    divide: float = Field(1.0, ge=1, description="divide all lengths of the trace by this number")
    requests: int | None = Field(None, ge=1, description="end after this many requests of --trace or --rate")
    shape: Literal["steps", "spikes", "diurnal"] | None = Field(
        None, description="vary --rate over time, or without it the number of users"
    )
    shape_peak: float = Field(4.0, gt=1, description="the peak of the shape, as a multiple of --rate or --users")
    shape_period: float = Field(
        60.0, gt=0, description="seconds of a step, from one spike to the next, or of a diurnal cycle"
    )
    shape_steps: int = Field(4, ge=2, description="number of steps from --rate or --users to the peak")
    shape_width: float = Field(10.0, gt=0, description="seconds of a spike; less than --shape-period")
    slo_ttft: float | None = Field(None, gt=0, description="limit on the time to first token, in seconds")
    slo_tpot: float | None = Field(None, gt=0, description="limit on the mean time per later token, in seconds")
    slo_e2e: float | None = Field(None, gt=0, description="limit on the time of a whole request, in seconds")
    slo_share: float = Field(0.9, gt=0, le=1, description="share of the requests that must meet the limits")

    @field_validator("speed", "divide")
    @classmethod
    def _of_a_trace(cls, given: float | None, info: ValidationInfo) -> float | None:
        if given != cls.model_fields[str(info.field_name)].default:
            if info.data.get("trace") is None:
                raise ValueError("needs --trace")
            if info.field_name == "speed" and info.data.get("rate") is not None:
                raise ValueError("excludes --rate")
        return given

    @field_validator("requests")
    @classmethod
    def _of_arrivals(cls, given: int | None, info: ValidationInfo) -> int | None:
        if given is not None and info.data.get("trace") is None and info.data.get("rate") is None:
            raise ValueError("needs --trace or --rate")
        return given

    @field_validator("shape")
    @classmethod
    def _not_of_a_trace(cls, given: str | None, info: ValidationInfo) -> str | None:
        if given is not None and info.data.get("trace") is not None:
            raise ValueError("excludes --trace, which has its own times")
        return given

    @field_validator("shape_width")
    @classmethod
    def _narrow(cls, given: float, info: ValidationInfo) -> float:
        if info.data.get("shape") == "spikes" and given >= info.data.get("shape_period", given + 1):
            raise ValueError(f"must be less than --shape-period, which is {info.data['shape_period']:g}")
        return given

    @property
    def slo(self) -> Slo:
        return Slo(self.slo_ttft, self.slo_tpot, self.slo_e2e, self.slo_share)

    @property
    def open_loop(self) -> bool:
        """Whether requests are sent at times that do not depend on answers."""
        return self.trace is not None or self.rate is not None

    @property
    def endless(self) -> bool:
        """Whether the run has no end of its own."""
        return self.trace is None and self.shape != "steps" and self.requests is None

    def flags(self) -> list[str]:
        """Returns the flags of the locustfile that have other values than their defaults."""
        changed = self.model_dump(mode="json", exclude_defaults=True, exclude=set(OF_LOCUST))
        return [part for name, value in changed.items() for part in (flag(name), str(value))]


def flag(name: str) -> str:
    """Returns the flag of a field."""
    return "--" + name.replace("_", "-")


FLAGS = {name: field.description for name, field in LoadSettings.model_fields.items() if name not in OF_LOCUST}
"""The flags of the locustfile: the name of the field, and its description."""
