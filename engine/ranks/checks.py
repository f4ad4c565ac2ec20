"""Refusals of tensor parallelism that depend on the worker's settings and machine, not on the model's sizes."""

from __future__ import annotations

from typing import Protocol

import kernels.row_parallel
from engine.device import Device
from engine.errors import ModelError
from engine.ranks.shard import Shard
from kernels.environment import linear_provider


class Asked(Protocol):
    """The settings that tensor parallelism excludes."""

    @property
    def quantization(self) -> str | None: ...

    @property
    def enable_lora(self) -> bool: ...


def check_ranks(shard: Shard, settings: Asked, device: Device) -> None:
    """Raises ModelError, which names the setting."""
    if shard.is_whole:
        return
    if device.compute_capability is not None:
        raise ModelError(f"{shard.asked} needs device cpu: exchanges between GPUs have not been written")
    if settings.quantization is not None:
        raise ModelError(f"{shard.asked} does not support quantization {settings.quantization}")
    if settings.enable_lora:
        raise ModelError(f"{shard.asked} does not support enable_lora")
    if kernels.row_parallel.entry() is None:
        raise ModelError(f"{shard.asked} needs the C++ kernels, which are not in use")
    if (provider := linear_provider()) in ("onednn", "torch"):
        raise ModelError(f"{shard.asked} needs our own linear layers, but KERNELS_LINEAR is {provider}")
