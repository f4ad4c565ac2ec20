"""Selects the build of the C++ kernels for this CPU, and registers its torch operators."""

from __future__ import annotations

from kernels.cpu.loader import ISAS, best_isa, current, load, supported_isas, using
from kernels.cpu.selection import CpuLibrary, Isa, fallbacks

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
