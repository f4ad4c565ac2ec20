"""Settings of a process that runs both roles."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from common.settings import settings_config
from decode_svc.settings import DecodeSettings


class BothSettings(DecodeSettings):
    """Flags of `python -m looseleaf.both_roles`, for both roles. The environment variables are LOOSELEAF_WORKER_*."""

    model_config = settings_config("LOOSELEAF_WORKER_", "looseleaf.both_roles")
    steps: Literal["auto", "turns", "free"] = Field(
        "auto",
        description="turns: one role steps at a time, with all threads; free: both step at the same time; "
        "auto: turns on a CPU, free on a GPU",
    )
