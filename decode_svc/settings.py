"""Settings of a decode worker."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from common.settings import WorkerSettings, settings_config


class DecodeSettings(WorkerSettings):
    """Flags of `python -m decode_svc`; LOOSELEAF_DECODE_* in the environment."""

    model_config = settings_config("LOOSELEAF_DECODE_", "decode_svc")
    reserve_blocks: int = Field(
        16,
        ge=0,
        description="least number of blocks kept allocated ahead; while sequences run it is what they need for six "
        "seconds, so that they go on while Redis does not answer",
    )
    preemption: Literal["auto", "swap", "give-back"] = Field(
        "auto",
        description="what becomes of a request whose blocks others need: swapped to host memory, where that has room, "
        "or given back to prefill; auto: whichever is estimated to cost less time",
    )
    swap_space: float = Field(
        1.0,
        ge=0,
        description="GiB of host memory for swapped blocks, at most as many as the arena has; 0: all are given back",
    )
