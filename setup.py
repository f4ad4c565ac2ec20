"""Builds the C++ kernels, once per instruction set, and the block store's atomics; puts the built-in model into wheels.
Metadata lives in pyproject.toml.

Every extension is optional: without a compiler the torch references run, logged and counted. NO_EXTENSIONS=1 in the
environment leaves them out: the Makefile compiles them while pip is still downloading.
"""

from __future__ import annotations

import copy
import os
import platform
import shutil
import sys
from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

# Bits must not depend on the optimiser: -ffast-math is off, and a multiply-add is fused only where the source says fma.
CXX_FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-fPIC", "-pthread"]
ISA_FLAGS = {
    "avx512": [
        "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mavx512vnni", "-mfma", "-mf16c",
        "-mprefer-vector-width=512", "-DLL_AVX512",
        # gcc 12 prints thousands of lines of warnings about its own header.
        "-Wno-maybe-uninitialized",
        "-Wno-uninitialized",
    ],
    "avx2": ["-mavx2", "-mfma", "-mf16c", "-DLL_AVX2"],
    "portable": ["-DLL_PORTABLE", "-Wno-psabi"],
}  # fmt: skip
AMX_FLAGS = [*ISA_FLAGS["avx512"], "-mamx-tile", "-mamx-bf16"]
AMX_SOURCE = "kernels/cpu/linear_amx.cpp"
MODEL = "models/storyteller"


class BuildExt(build_ext):
    """Gives every extension its own object folder, as the same sources are compiled several times; on all cores."""

    def initialize_options(self) -> None:
        super().initialize_options()
        self.parallel = os.cpu_count()

    def build_extension(self, ext: Extension) -> None:
        alone = copy.copy(self)
        alone.build_temp = os.path.join(self.build_temp, ext.name)
        build_ext.build_extension(alone, ext)


class BuildPy(build_py):
    """The packages, and inside `looseleaf` the built-in model where the sources have it (an image's have not)."""

    def run(self) -> None:
        build_py.run(self)
        if os.path.isdir(MODEL) and not self.editable_mode:
            shutil.copytree(MODEL, os.path.join(self.build_lib, "looseleaf", "storyteller"), dirs_exist_ok=True)


def kernel_extensions() -> list[Extension]:
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    shared = sorted(set(glob("kernels/cpu/*.cpp")) - {AMX_SOURCE})
    builds = {isa: (shared, flags) for isa, flags in ISA_FLAGS.items() if is_x86 or isa == "portable"}
    if is_x86 and sys.platform == "linux":
        builds["amx"] = ([AMX_SOURCE], AMX_FLAGS)
    return [
        Extension(
            f"kernels._cpu_{isa}",
            sources=sources,
            depends=sorted(glob("kernels/cpu/*.h")),
            extra_compile_args=CXX_FLAGS + flags,
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,
        )
        for isa, (sources, flags) in builds.items()
    ]


def atomics_extension() -> list[Extension]:
    source = "block_store/arena/atomics.c"
    flags = ["-std=c11", "-O2"]
    return (
        [Extension("block_store.arena._atomics", [source], extra_compile_args=flags)] if os.path.exists(source) else []
    )


extensions = [] if os.environ.get("NO_EXTENSIONS") else kernel_extensions() + atomics_extension()
setup(ext_modules=extensions, cmdclass={"build_ext": BuildExt, "build_py": BuildPy})
