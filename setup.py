"""Builds the C++ kernels for each instruction set and the block store's atomics, and adds the built-in model to wheels.
The metadata is in pyproject.toml.

The kernels are optional. Without a compiler, the torch references replace them, and each use is logged and counted.

Environment variables:

NO_EXTENSIONS   if set, nothing is compiled: the Makefile compiles the extensions while pip downloads packages
KERNEL_BUILDS   "native": only the kernels that this CPU uses; unset: those for every instruction set
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

# Results must not depend on the optimizer: no -ffast-math, and a multiply-add is fused only where the source has fma.
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
AMX_SOURCES = ["kernels/cpu/attention_amx.cpp", "kernels/cpu/linear_amx.cpp"]
MODEL = "models/storyteller"


class BuildExt(build_ext):
    """A build_ext command that compiles on all cores. Each extension has its own object folder, because several of them
    are compiled from the same sources.
    """

    def initialize_options(self) -> None:
        super().initialize_options()
        self.parallel = os.cpu_count()

    def build_extension(self, ext: Extension) -> None:
        alone = copy.copy(self)
        alone.build_temp = os.path.join(self.build_temp, ext.name)
        build_ext.build_extension(alone, ext)


class BuildPy(build_py):
    """A build_py command that also copies the built-in model into the package `looseleaf`, if the sources contain it.
    The sources of an image do not.
    """

    def run(self) -> None:
        build_py.run(self)
        if os.path.isdir(MODEL) and not self.editable_mode:
            shutil.copytree(MODEL, os.path.join(self.build_lib, "looseleaf", "storyteller"), dirs_exist_ok=True)


def kernel_extensions() -> list[Extension]:
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    shared = sorted(set(glob("kernels/cpu/*.cpp")) - set(AMX_SOURCES))
    builds = {isa: (shared, flags) for isa, flags in ISA_FLAGS.items() if is_x86 or isa == "portable"}
    if is_x86 and sys.platform == "linux":
        builds["amx"] = (AMX_SOURCES, AMX_FLAGS)
    if os.environ.get("KERNEL_BUILDS") == "native":
        sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
        from kernels.cpu.loader import native_builds

        builds = {isa: builds[isa] for isa in native_builds()}
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
