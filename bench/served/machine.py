"""Determines the origin of a result (date, commit, machine, load), and stores results in files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from looseleaf.serve.model_source import REPOSITORY

RESULTS = REPOSITORY / "docs" / "benchmarks" / "cpu"
_FEATURES = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_bf16": "AVX512-BF16", "amx_bf16": "AMX"}
"""The CPU flags of instruction sets, and the class of a CPU whose last flag among them it is."""
CLASSES = ("no AVX2", *_FEATURES.values())


def provenance() -> dict[str, Any]:
    """Returns the date (UTC), the commit, and the machine: CPU, usable cores, instruction sets, memory and load."""
    cpu = Path("/proc/cpuinfo").read_text()
    flags = set((_field(cpu, "flags") or "").split())
    memory_kib = int((_field(Path("/proc/meminfo").read_text(), "MemTotal") or "0 kB").split()[0])
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": commit(),
        "cpu": _field(cpu, "model name") or "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "isa": [feature for feature in _FEATURES if feature in flags],
        "memory_gib": round(memory_kib / (1 << 20)),
        "load1": round(os.getloadavg()[0], 2),
    }


def class_of(origin: Mapping[str, Any]) -> str:
    """Returns the class of the CPU, one of CLASSES, by its instruction sets."""
    return _FEATURES[origin["isa"][-1]] if origin["isa"] else CLASSES[0]


def commit() -> str:
    """Returns the short hash of the checked-out commit, followed by + if tracked files differ from it, or "unknown" if
    git fails.
    """
    git = ["git", "-C", str(REPOSITORY)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    if head.returncode:
        return "unknown"
    changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True).stdout.strip()
    return head.stdout.strip() + ("+" if changed else "")


def machine_slug(cpu: str, cores: int) -> str:
    """Returns a name of a machine for file names. For example, "AMD EPYC 7B13 64-Core Processor" with 2 cores becomes
    "amd-epyc-7b13-2c".
    """
    words = re.sub(r"\(\w+\)|@.*|\b(CPU|Processor|\d+-Core)\b", " ", cpu)
    return "-".join(re.findall(r"[a-z0-9]+", words.lower())) + f"-{cores}c"


def keep(name: str, result: Mapping[str, Any], origin: Mapping[str, Any], directory: Path = RESULTS) -> Path:
    """Writes `result` with its origin to DATE-MACHINE-CLASS-COMMIT-NAME.json. Returns the path."""
    slug = f"{machine_slug(origin['cpu'], origin['cores'])}-{class_of(origin).lower().replace(' ', '-')}"
    path = directory / f"{origin['date']}-{slug}-{origin['commit']}-{name}.json"
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**origin, **result}, indent=1) + "\n")
    return path


def _field(text: str, name: str) -> str | None:
    found = re.search(rf"^{name}\s*:\s*(.+)$", text, re.MULTILINE)
    return found and found[1].strip()
