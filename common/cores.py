"""Counts the cores that this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
"""The file with a container's CPU quota and period in microseconds (cgroup v2). The quota "max" means no limit."""


def usable_cores() -> int:
    """Returns the number of cores on which this process may run, or the container's limit (`docker run --cpus`),
    rounded up, if that is smaller.
    """
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = CPU_MAX.read_text().split()
        return max(1, min(allowed, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no cgroup v2, or no limit
        return allowed
