"""Settings of `python -m loadtest`."""

from __future__ import annotations

from pydantic import Field

from common.settings import Settings, settings_config


class LoadSettings(Settings):
    """Flags of `python -m loadtest`, which runs locust without its web page against a Looseleaf server that is running
    or that is started for the run.
    """

    model_config = settings_config("LOOSELEAF_LOADTEST_", "loadtest")

    users: int = Field(32, ge=1, description="users at once, half gRPC and half HTTP")
    spawn_rate: float = Field(16.0, gt=0, description="users started a second")
    run_time: str = Field("60s", pattern=r"^(\d+[hms])+$", description="how long")
    http: str = Field("127.0.0.1:8000", description="host:port of the gateway's HTTP")
    grpc: str = Field("127.0.0.1:50051", description="host:port of the gateway's gRPC")
    seed: int = Field(0, description="seed of the workload")
    prompt_median: float = Field(96.0, gt=0, description="median prompt length in tokens")
    output_median: float = Field(32.0, gt=0, description="median output length in tokens")
    trace: str | None = Field(None, description="CSV of lengths in Azure's form, instead of distributions")
    csv: str | None = Field(None, description="prefix of CSV files for locust to write")
    start_timeout_s: float = Field(600.0, gt=0, description="seconds to wait for a server started for the run")
