"""The settings of `python -m loadtest`."""

from __future__ import annotations

from pydantic import Field

from common.settings import Settings, settings_config


class LoadSettings(Settings):
    """Flags of `python -m loadtest`, which runs locust without its web page against a Looseleaf server that is running
    or that is started for the run.
    """

    model_config = settings_config("LOOSELEAF_LOADTEST_", "loadtest")

    users: int = Field(32, ge=1, description="concurrent users, half of them over gRPC and half over HTTP")
    spawn_rate: float = Field(16.0, gt=0, description="users to start per second")
    run_time: str = Field("60s", pattern=r"^(\d+[hms])+$", description="duration of the run, such as 60s or 1h30m")
    http: str = Field("127.0.0.1:8000", description="host:port of the gateway's HTTP API")
    grpc: str = Field("127.0.0.1:50051", description="host:port of the gateway's gRPC API")
    seed: int = Field(0, description="seed of the workload")
    prompt_median: float = Field(96.0, gt=0, description="median prompt length in tokens")
    output_median: float = Field(32.0, gt=0, description="median output length in tokens")
    trace: str | None = Field(
        None, description="trace in Azure's or Mooncake's format whose lengths are used instead of distributions"
    )
    csv: str | None = Field(None, description="prefix of the CSV files that locust writes")
    start_timeout_s: float = Field(600.0, gt=0, description="seconds to wait for a server that the run starts")
