"""Counts the cores that this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
"""A container's quota and its period in microseconds, or "max" (cgroup v2)."""


def usable_cores() -> int:
    """Returns the number of cores that this process may run on, or, if that is less, the rounded-up number that its
    container may use (`docker run --cpus`).
    """
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = CPU_MAX.read_text().split()
        return max(1, min(allowed, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no cgroup v2, or no limit
        return allowed
