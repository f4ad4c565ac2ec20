"""Atomic operations on the generations and states in an arena's header, implemented in C (`atomics.c`)."""

from __future__ import annotations

import ctypes
import functools
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

U64Array = npt.NDArray[np.uint64]
I64Array = npt.NDArray[np.int64]
_Memory = ctypes.c_char * 0


def library_path() -> Path:
    """Returns the path of the C library. Raises FileNotFoundError, whose message gives the build command, if the
    library has not been built.
    """
    here = Path(__file__).parent
    for suffix in (*EXTENSION_SUFFIXES, ".so"):
        if (path := here / f"_atomics{suffix}").exists():
            return path
    raise FileNotFoundError(
        f"{here}/_atomics.so is not built; run `pip install -e .` or "
        f"`gcc -O2 -shared -fPIC -o {here}/_atomics.so {here}/atomics.c`"
    )


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.PyDLL(str(library_path()))  # keeps the interpreter lock: releasing it takes longer than a call
    for name in ("looseleaf_raise_generations", "looseleaf_check_generations"):
        function = getattr(library, name)
        function.restype = ctypes.c_int64
        function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    library.looseleaf_enter_states.restype = None
    library.looseleaf_enter_states.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint8, ctypes.c_int64]
    return library


def _at(array: npt.NDArray[Any]) -> object:
    """Returns the array's memory as an argument of a C function, which takes a fifth of the time of `array.ctypes`."""
    return _Memory.from_buffer(array.data) if array.flags.writeable else array.ctypes.data


def _arguments(base: U64Array, ids: npt.NDArray[np.generic], gens: npt.NDArray[np.generic]) -> tuple[Any, ...]:
    blocks: I64Array = np.ascontiguousarray(ids, dtype=np.int64).ravel()
    wanted: U64Array = np.ascontiguousarray(gens, dtype=np.uint64).ravel()
    if blocks.size != wanted.size:
        raise ValueError(f"{blocks.size} blocks but {wanted.size} generations")
    return _at(base), base.size, _at(blocks), _at(wanted), blocks.size


def raise_generations(base: U64Array, ids: npt.NDArray[np.generic], gens: npt.NDArray[np.generic]) -> int | None:
    """Raises `base[ids[i]]` to `gens[i]`, for each i in order, by compare-and-swap from a lower value. Stops at the
    first generation that was not lower and returns its index, or returns None if all generations were raised. Ids
    outside `base` count as not lower.
    """
    first = int(_library().looseleaf_raise_generations(*_arguments(base, ids, gens)))
    return None if first < 0 else first


def enter_states(base: npt.NDArray[np.uint8], ids: I64Array, state: int) -> None:
    """Sets `base[ids] = state`. Other threads see the new state only after all earlier stores of this thread. Raises
    IndexError for ids outside `base`.
    """
    blocks: I64Array = np.ascontiguousarray(ids, dtype=np.int64)
    if blocks.size and not 0 <= int(blocks.min()) <= int(blocks.max()) < base.size:
        raise IndexError(f"blocks {blocks.min()} to {blocks.max()} are not all below {base.size}")
    _library().looseleaf_enter_states(_at(base), _at(blocks), state, blocks.size)


def fence() -> None:
    """Issues a full memory barrier. Stores before the barrier are visible to all threads before the loads after it are
    executed.
    """
    nothing: U64Array = np.zeros(0, np.uint64)
    first_mismatch(nothing, nothing, nothing)  # fences on both sides


def first_mismatch(base: U64Array, ids: npt.NDArray[np.generic], gens: npt.NDArray[np.generic]) -> int | None:
    """Returns the position in `ids` of the first block that does not have the expected generation, or None if all
    blocks have it. Ids outside `base` never match.
    """
    return Expected(base, ids, gens).first_mismatch()


class Expected:
    """The generations that some blocks should have, prepared for repeated checks."""

    __slots__ = ("_arguments", "_arrays", "_check")

    def __init__(self, base: U64Array, ids: npt.NDArray[np.generic], gens: npt.NDArray[np.generic]) -> None:
        """Neither `ids` nor `gens` may be changed as long as this object is used. Raises ValueError if their sizes
        differ.
        """
        self._arguments = _arguments(base, ids, gens)
        self._arrays = (base, ids, gens)  # keeps the memory
        self._check = _library().looseleaf_check_generations

    def first_mismatch(self) -> int | None:
        """Returns the result of the function of the same name, as of now."""
        first = int(self._check(*self._arguments))
        return None if first < 0 else first
