"""Finds, loads and selects a build of the C++ kernels."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import platform
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kernels.cpu.selection import CpuLibrary, Isa, count_fallback, selection

if TYPE_CHECKING:
    import torch

ISAS: tuple[Isa, ...] = ("avx512", "avx2", "portable", "reference")  # best first

# CPU features that each build requires, by their names in /proc/cpuinfo.
_NEEDS: dict[str, frozenset[str]] = {
    "avx512": frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni", "fma", "f16c"}),
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
    """Returns the installed builds that this CPU can run, best first (excluding "reference")."""
    return tuple(i for i in ISAS if i != "reference" and _NEEDS[i] <= _cpu_flags() and _find(i) is not None)


def native_builds() -> tuple[str, ...]:
    """Returns the builds that this CPU uses, whether or not they are installed: the best one, and that for AMX tiles if
    it has them.
    """
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    best = next(isa for isa, needs in _NEEDS.items() if needs <= _cpu_flags() and (is_x86 or isa == "portable"))
    return (best, "amx") if is_x86 and _cpu_flags() >= _AMX_NEEDS else (best,)


def best_isa() -> Isa:
    """Returns the build that `load()` chooses by default."""
    return next(iter(supported_isas()), "reference")


def _find(isa: str) -> Path | None:
    if isa != "portable" and platform.machine() not in ("x86_64", "AMD64"):
        return None
    return next(iter(sorted(Path(__file__).parent.parent.glob(f"_cpu_{isa}.*so"))), None)


@functools.cache
def _open(isa: Isa) -> CpuLibrary:
    """Loads one build. Raises ValueError if the build is not installed or this CPU cannot run it, and OSError if
    loading fails.
    """
    if isa in ("reference", "triton"):
        return CpuLibrary(isa, None, "requested")
    path = _find(isa)
    if isa not in supported_isas() or path is None:
        raise ValueError(f"kernels for {isa!r} are not built or cannot run on this CPU; usable: {supported_isas()}")
    from kernels.cpu.amx import attend_on_tiles  # needs torch

    build = CpuLibrary(isa, ctypes.CDLL(str(path)), "best for this CPU")
    try:
        return replace(build, tiles=attend_on_tiles(build))
    except (OSError, AttributeError) as error:
        count_fallback("attention on AMX tiles", str(error), "in vectors")
        return build


def amx_library() -> Path | None:
    """Returns the build for AMX tiles, if one is installed and this CPU can run it."""
    return _find("amx") if _cpu_flags() >= _AMX_NEEDS else None


def load(isa: Isa | None = None) -> CpuLibrary:
    """Chooses the process's kernels: `isa`, or the best build for this CPU. Returns the build now in use. Raises
    ValueError if `isa` is given but is not installed, cannot run on this CPU or cannot be loaded. If `isa` is None, the
    torch reference is used if no build is installed that this CPU can run, or if the best build cannot be loaded; this
    is logged and counted under "library".
    """
    from kernels.cpu.ops import register  # needs torch, unlike the queries above

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
    _LOG.info("kernels: %s%s (%s)", library.isa, ", attention on AMX tiles" if library.tiles else "", library.why)
    selection().library = library
    return library


def current() -> CpuLibrary:
    """Returns the build in use. If no build has been chosen, loads the best build."""
    return selection().library or load()


@contextlib.contextmanager
def using(isa: Isa) -> Iterator[CpuLibrary]:
    """Runs a `with` block on a different build, for tests and benchmarks. The whole process is affected, so other
    threads must not run kernels at the same time.
    """
    before = current()
    try:
        yield load(isa)
    finally:
        selection().library = before


def on_triton(tensor: torch.Tensor) -> bool:
    """Returns whether to use the Triton kernels for a tensor, because it is on a GPU or because they are rehearsed on
    the CPU.
    """
    return tensor.is_cuda or current().isa == "triton"
