"""A stand-in for triton's CUDA driver. With it, triton compiles the kernels of launches for a chip that may be absent,
and the launches are recorded but not run. The arguments of a launch (alignment, integers that are 1 or divisible by 16,
None) determine which variant of a kernel is compiled. The stand-in relies on the driver interface of triton 3.6 and
3.7, and does not work with TRITON_INTERPRET=1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from kernels.gpu.compile import SHARED_LIMIT_BYTES


@dataclass(frozen=True, slots=True)
class Launch:
    kernel: str
    grid: tuple[int, int, int]
    variant: str
    """Hash of the compiled variant."""


@dataclass
class DryDriver:
    """A driver that records launches. Call `install` to use it."""

    cc: int
    launches: list[Launch] = field(default_factory=list)

    def install(self) -> None:
        driver.set_active(self)

    @property
    def utils(self) -> DryDriver:
        return self

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        def launch(x: int, y: int, z: int, *_: Any) -> None:
            self.launches.append(Launch(source.fn.__name__, (x, y, z), metadata.hash))

        return launch

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_LIMIT_BYTES[self.cc]}

    def load_binary(self, *_: Any) -> tuple[int, int, int, int, int]:
        """Returns (module, function, registers, spills, maximum threads). All values are dummies."""
        return 1, 1, 0, 0, 1024

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.cc, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")
