"""The C++ kernels: which build runs on this CPU, and its torch operators. Knows tensors, not layers or sequences."""

from __future__ import annotations

from kernels.cpu.loader import ISAS, CpuLibrary, Isa, best_isa, current, fallbacks, load, supported_isas, using

__all__ = [
    "ISAS",
    "CpuLibrary",
    "Isa",
    "best_isa",
    "current",
    "fallbacks",
    "load",
    "supported_isas",
    "using",
]
