"""The settings that affect the bits of K and V, in addition to model and layout, as one string. Workers with different
strings share no blocks (docs/design.md, Blocks and the arena: hash domain).
"""

from __future__ import annotations

from typing import Protocol

import torch

import kernels
from common.types import DType
from engine.device import Device
from kernels.cpu.loader import current
from kernels.linear import provider_of
from kernels.providers.base import AttentionProvider
from kernels.row_parallel import our_provider


class Asked(Protocol):
    """The interface of the settings that `numerics` reads."""

    @property
    def deterministic(self) -> bool: ...

    @property
    def quantization(self) -> str | None: ...


def numerics(
    device: Device, attention: AttentionProvider, dtype: DType, kv_dtype: DType, settings: Asked, parts: int = 1
) -> str:
    """Returns the settings as `name=value` pairs with spaces between them. `parts` is the number of parts in which
    output projections are summed (`engine.ranks.shard`).
    """
    said = {
        "dtype": dtype,
        "kv": kv_dtype,
        "attention": f"{attention.name}/{attention.version}",
        **(
            _on_cpu(dtype, parts)
            if device.compute_capability is None
            else _on_gpu(device.compute_capability, settings.deterministic)
        ),
        "deterministic": attention.deterministic,
        **({"weights": settings.quantization} if settings.quantization is not None else {}),
    }
    return " ".join(f"{name}={value}" for name, value in said.items())


def _on_cpu(dtype: DType, parts: int) -> dict[str, str]:
    tiles = "+amx" if torch.cpu._is_amx_tile_supported() else ""
    linear = provider_of(getattr(torch, dtype)) if parts == 1 else our_provider(getattr(torch, dtype))
    return {
        "isa": current().isa,
        "linear": f"{linear}/{kernels.__version__ if linear in ('amx', 'simd') else torch.__version__}",
        "cpu": torch.backends.cpu.get_cpu_capability() + tiles,
        **({"parts": str(parts)} if parts > 1 else {}),
    }


def _on_gpu(compute_capability: tuple[int, int], deterministic: bool) -> dict[str, str]:
    """Returns the names and values of the settings of a GPU. cuBLAS' algorithms depend on torch's CUDA version, and our
    own kernels on Triton's version.
    """
    import triton

    own = f"triton/{kernels.__version__}+triton-{triton.__version__}"
    cublas = f"cublas/{torch.__version__}/{torch.version.cuda}"
    return {"cc": "{}.{}".format(*compute_capability), "kernels": own, "linear": own if deterministic else cublas}
