"""Finds, loads and selects a build of the C++ kernels; counts what had to run on the torch reference instead.

Knows nothing of what the kernels compute.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import platform
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Isa = Literal["avx512", "avx2", "portable", "reference", "triton"]
ISAS: tuple[Isa, ...] = ("avx512", "avx2", "portable", "reference")  # best first; "reference" is plain torch
# "triton" is the GPU's kernels under triton's interpreter: a rehearsal, some thousand times slower, never chosen.

# What each build was compiled for, in the names of /proc/cpuinfo.
_NEEDS: dict[str, frozenset[str]] = {
    "avx512": frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "fma", "f16c"}),
    "avx2": frozenset({"avx2", "fma", "f16c"}),
    "portable": frozenset(),
}
_AMX_NEEDS = _NEEDS["avx512"] | {"amx_tile", "amx_bf16"}
_LOG = logging.getLogger("looseleaf.kernels")


@dataclass(frozen=True, slots=True)
class CpuLibrary:
    """One loaded build. `handle` is None when the torch reference (or the rehearsal) stands in; `why` says why."""

    isa: Isa
    handle: ctypes.CDLL | None
    why: str


@dataclass(slots=True)
class _Selection:
    """The process's choice and the counts of what did not take the fast path."""

    library: CpuLibrary | None = None
    fallbacks: Counter[str] = field(default_factory=Counter)


@functools.cache
def _selection() -> _Selection:
    return _Selection()


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
    from kernels.cpu.ops import register

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
    _selection().library = library
    return library


def current() -> CpuLibrary:
    """The library in use, loading the best one on first use."""
    return _selection().library or load()


@contextlib.contextmanager
def using(isa: Isa) -> Iterator[CpuLibrary]:
    """Runs a block of code on another build, for tests and benchmarks. Process-wide: not for concurrent threads."""
    before = current()
    try:
        yield load(isa)
    finally:
        _selection().library = before


def on_triton(tensor: torch.Tensor) -> bool:
    """Whether the Triton kernels take this tensor: it lies on a GPU, or the process rehearses them on the CPU."""
    return tensor.is_cuda or current().isa == "triton"


def count_fallback(what: str, why: str, instead: str = "on the torch reference") -> None:
    """Counts one use of something slower in place of a fast path and logs the first one of each kind."""
    counts = _selection().fallbacks
    counts[what] += 1
    if counts[what] == 1:
        _LOG.warning("kernels: %s runs %s: %s", what, instead, why)


def fallbacks() -> dict[str, int]:
    """How often each kernel took a slower path though nobody asked for it."""
    return dict(_selection().fallbacks)
