"""Defines what a measurement of the page consists of: its options, its section, and its claims."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

from common.errors import StartupError

PARTS = (
    "worked_example", "memory", "contiguous", "block_sizes", "sharing", "preemption", "hit_rates", "batching", "load",
    "no_cache", "interference", "hand_over", "goodput", "front",
)  # fmt: skip
"""The modules of this package that are measurements, in the order of the page."""

VLLM = "Kwon et al., *Efficient Memory Management for LLM Serving with PagedAttention*, SOSP 2023"
ORCA = "Yu et al., *Orca: A Distributed Serving System for Transformer-Based Generative Models*, OSDI 2022"
DISTSERVE = "Zhong et al., *DistServe: Disaggregating Prefill and Decoding*, OSDI 2024"
MOONCAKE = "Qin et al., *Mooncake: Trading More Storage for Less Computation*, FAST 2025"
SARATHI = "Agrawal et al., *Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve*, OSDI 2024"


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a measurement."""

    quick: bool = False
    """Whether to make a rehearsal with few requests."""
    trace: Path | None = None
    """A trace whose lengths are used (`looseleaf.simulation.trace`); None for drawn lengths."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim of the literature, with the figure measured here."""

    text: str
    source: str
    theirs: str
    ours: str
    holds: bool
    why: str = ""
    """The reason for a difference. It must not be empty if the claim does not hold."""


@dataclass(frozen=True, slots=True)
class Section:
    """A section of the page."""

    title: str
    text: str
    """Markdown without the title."""
    claims: Sequence[Claim] = ()
    plots: Mapping[str, str] = field(default_factory=dict)
    """SVG images by file name."""


class Part(Protocol):
    """A module of this package that is a measurement."""

    LIMIT_S: int
    """The measurement is ended after this many seconds."""

    def measure(self, options: Options) -> dict[str, Any]:
        """Makes the measurement, and returns a JSON value."""

    def section(self, result: Mapping[str, Any]) -> Section:
        """Returns the section of the page for a result of `measure`."""


def load(name: str) -> Part:
    """Returns the measurement `name`."""
    return cast(Part, importlib.import_module(f"bench.paper.{name}"))


def chosen(only: Sequence[str]) -> list[str]:
    """Returns the names of the chosen measurements, or of all if `only` is empty. Raises StartupError if a name is
    unknown.
    """
    for name in only:
        if name not in PARTS:
            raise StartupError(f"--only {name!r}: must be one of {', '.join(PARTS)}")
    return [name for name in PARTS if not only or name in only]


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
