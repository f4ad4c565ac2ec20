"""The environment variables of the kernels.

KERNELS_LINEAR       the provider of linear layers (amx, onednn, simd, torch); unset: chosen by measurement
KERNELS_CHOICES      a directory in which the processes of a deployment agree on the measured choice
TRITON_INTERPRET=1   triton's own variable: GPU kernels are interpreted on the CPU, as a rehearsal
"""

from __future__ import annotations

import os


def linear_provider() -> str | None:
    return os.environ.get("KERNELS_LINEAR") or None


def choices_directory() -> str | None:
    return os.environ.get("KERNELS_CHOICES") or None


def interprets_triton() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
