"""Settings of a decode worker."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from common.settings import WorkerSettings, settings_config
from common.speculative_config import SPECULATIVE_CONFIG, SpeculativeConfigText


class DecodeSettings(WorkerSettings):
    """The settings of a decode worker. Each can be given as a flag of `python -m decode_svc`, or as an environment
    variable whose name begins with LOOSELEAF_DECODE_.
    """

    model_config = settings_config("LOOSELEAF_DECODE_", "decode_svc")
    reserve_blocks: int = Field(
        16,
        ge=0,
        description="minimum number of blocks kept allocated in advance; running sequences raise it to what they need "
        "in six seconds, so that they can continue while Redis does not answer",
    )
    preemption: Literal["auto", "swap", "give-back"] = Field(
        "auto",
        description="what to do with a request whose blocks others need: swap it to host memory, if there is room, or "
        "give it back to prefill; auto: whichever is estimated to take less time",
    )
    swap_space: float = Field(
        1.0,
        ge=0,
        description="GiB of host memory for swapped blocks, limited to the number of blocks in the arena; "
        "0: all requests are given back",
    )
    speculative_config: SpeculativeConfigText = Field(None, description=SPECULATIVE_CONFIG)
