"""Finds, loads and selects a build of the C++ kernels. Independent of what the kernels compute."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kernels.cpu.selection import CpuLibrary, Isa, count_fallback, selection

if TYPE_CHECKING:
    import torch

ISAS: tuple[Isa, ...] = ("avx512", "avx2", "portable", "reference")  # best first

# What each build was compiled for, in the names of /proc/cpuinfo.
_NEEDS: dict[str, frozenset[str]] = {
    "avx512": frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "fma", "f16c"}),
    "avx2": frozenset({"avx2", "fma", "f16c"}),
    "portable": frozenset(),
}
_AMX_NEEDS = _NEEDS["avx512"] | {"amx_tile", "amx_bf16"}
_LOG = logging.getLogger("looseleaf.kernels")


@functools.cache
def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":")[1] for line in lines if line.startswith("flags")), "").split())


def supported_isas() -> tuple[Isa, ...]:
    """The builds that are installed and that this CPU can run, best first (without "reference")."""
    return tuple(i for i in ISAS if i != "reference" and _NEEDS[i] <= _cpu_flags() and _find(i) is not None)


def best_isa() -> Isa:
    """What `load()` takes when nothing is forced."""
    return next(iter(supported_isas()), "reference")


def _find(isa: str) -> Path | None:
    if isa != "portable" and platform.machine() not in ("x86_64", "AMD64"):
        return None
    return next(iter(sorted(Path(__file__).parent.parent.glob(f"_cpu_{isa}.*so"))), None)


@functools.cache
def _open(isa: Isa) -> CpuLibrary:
    """Loads one build. Errors: ValueError when this CPU or installation does not have it; OSError from the loader."""
    if isa in ("reference", "triton"):
        return CpuLibrary(isa, None, "asked for")
    path = _find(isa)
    if isa not in supported_isas() or path is None:
        raise ValueError(f"kernels for {isa!r} are not built or not supported by this CPU; have {supported_isas()}")
    return CpuLibrary(isa, ctypes.CDLL(str(path)), "best of this CPU")


def amx_library() -> Path | None:
    """The build for AMX tiles, if there is one and this CPU can run it."""
    return _find("amx") if _cpu_flags() >= _AMX_NEEDS else None


def load(isa: Isa | None = None) -> CpuLibrary:
    """Chooses the process's kernels: `isa`, or the best this CPU has. Returns what runs from now on.

    Errors: ValueError when a forced `isa` cannot run here. Without one, a library that cannot be loaded is replaced
    by the torch reference, which is logged and counted under "library".
    """
    from kernels.cpu.ops import register  # it needs torch; to ask what this CPU has does not

    wanted = isa or best_isa()
    try:
        library = _open(wanted)
        if isa is None and wanted == "reference":
            count_fallback("library", "no build is installed: run `python setup.py build_ext --inplace`")
    except OSError as error:
        if isa is not None:
            raise ValueError(f"kernels for {isa!r} cannot be loaded: {error}") from error
        library = CpuLibrary("reference", None, str(error))
        count_fallback("library", str(error))
    register()
    _LOG.info("kernels: %s (%s)", library.isa, library.why)
    selection().library = library
    return library


def current() -> CpuLibrary:
    """The library in use, loading the best one on first use."""
    return selection().library or load()


@contextlib.contextmanager
def using(isa: Isa) -> Iterator[CpuLibrary]:
    """Runs a block of code on another build, for tests and benchmarks. Process-wide: not for concurrent threads."""
    before = current()
    try:
        yield load(isa)
    finally:
        selection().library = before


def on_triton(tensor: torch.Tensor) -> bool:
    """Whether the Triton kernels take this tensor: it lies on a GPU, or the process rehearses them on the CPU."""
    return tensor.is_cuda or current().isa == "triton"
