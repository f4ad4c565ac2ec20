"""Settings of a decode worker."""

from __future__ import annotations

from pydantic import Field

from common.settings import WorkerSettings, settings_config


class DecodeSettings(WorkerSettings):
    """Flags of `python -m decode_svc`; LOOSELEAF_DECODE_* in the environment."""

    model_config = settings_config("LOOSELEAF_DECODE_", "decode_svc")
    reserve_blocks: int = Field(16, ge=0, description="blocks kept allocated ahead, so that few steps call the ledger")
