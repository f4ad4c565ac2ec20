"""The environment variables that kernels read. No other file of this package reads any.

KERNELS_LINEAR       which product linears run on (amx, onednn, simd, torch); absent: the fastest that is measured
KERNELS_CHOICES      a directory in which the processes of a launch agree on what was measured
TRITON_INTERPRET=1   triton's own: kernels for a GPU are interpreted on the CPU, as a rehearsal
"""

from __future__ import annotations

import os


def linear_provider() -> str | None:
    return os.environ.get("KERNELS_LINEAR") or None


def choices_directory() -> str | None:
    return os.environ.get("KERNELS_CHOICES") or None


def interprets_triton() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
