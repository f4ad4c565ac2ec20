"""Checks that a worker's settings and machine support several ranks. `Place.check` checks the model."""

from __future__ import annotations

from typing import Protocol

import kernels.row_parallel
from engine.device import Device
from engine.errors import ModelError
from engine.ranks.place import Place
from engine.ranks.shard import Shard
from kernels.environment import linear_provider


class Asked(Protocol):
    """The interface of the settings that `check_ranks` reads."""

    @property
    def quantization(self) -> str | None: ...

    @property
    def enable_lora(self) -> bool: ...


def check_ranks(place: Place, settings: Asked, device: Device) -> None:
    """Raises ModelError if the model is divided into stages, or its products into parts, and a setting or the device
    does not support this.
    """
    shard, stage = place.shard, place.stage
    if shard.is_whole and stage.is_whole:
        return
    asked = stage.asked if shard.is_whole else shard.asked
    if device.compute_capability is not None:
        raise ModelError(f"{asked} needs device cpu: exchanges between GPUs are not implemented")
    if settings.enable_lora:
        raise ModelError(f"{asked} does not support enable_lora")
    if not shard.is_whole:
        _check_products(shard, settings)


def _check_products(shard: Shard, settings: Asked) -> None:
    if settings.quantization is not None:
        raise ModelError(f"{shard.asked} does not support quantization {settings.quantization}")
    if kernels.row_parallel.entry() is None:
        raise ModelError(f"{shard.asked} needs the C++ kernels, which are not in use")
    if (provider := linear_provider()) in ("onednn", "torch"):
        raise ModelError(f"{shard.asked} needs our own linear layers, but KERNELS_LINEAR is {provider}")
