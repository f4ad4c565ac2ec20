"""Stores results, and generates the page from all stored results."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.paper.parts import DISTSERVE, MOONCAKE, ORCA, PARTS, SARATHI, VLLM, Section, load, table

INTRODUCTION = """\
# The measurements of the literature, made here

`make paper` repeats measurements of the papers below on this machine, and writes this page with its plots. The papers
used GPUs and models of 13 to 175 billion parameters. This machine has two CPU cores, so the models are small. Counts,
shares and ratios can be compared with the papers; absolute times cannot. The papers' figures were entered from memory
and were not checked against the papers' texts, except those that other pages of this project already quote.

    make paper                                        # everything, at most 40 minutes
    make paper ARGS="--only memory"                   # one measurement
    make paper ARGS="--quick --folder /tmp/paper"     # a rehearsal

Each result is stored beside this page as NAME.json, with date, commit and machine. The page is generated from these
files.
"""


def store(folder: Path, name: str, file: Path, origin: Mapping[str, Any]) -> None:
    """Stores the result in `file` as NAME.json, with its origin."""
    result = json.loads(file.read_text())
    (folder / f"{name}.json").write_text(json.dumps({"origin": origin, "result": result}, indent=1) + "\n")


def stored(folder: Path) -> dict[str, Any]:
    """Returns the stored results, with their origins, in the order of the page."""
    paths = {name: folder / f"{name}.json" for name in PARTS}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def write(folder: Path) -> None:
    """Writes the page and its plots."""
    results = stored(folder)
    sections = {name: load(name).section(kept["result"]) for name, kept in results.items()}
    for section in sections.values():
        for file, image in section.plots.items():
            (folder / file).write_text(image)
    origins = {name: kept["origin"] for name, kept in results.items()}
    (folder / "README.md").write_text(render(sections, origins))


def render(sections: Mapping[str, Section], origins: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the page as Markdown."""
    parts = [INTRODUCTION, claims(sections)]
    for name, section in sections.items():
        parts += [f"## {section.title}", origin_line(name, origins[name]), section.text]
        parts += [f"![{caption(image)}]({file})" for file, image in section.plots.items()]
    if missing := [name for name in PARTS if name not in sections]:
        parts += ["## Not measured", "\n".join(f"* **{name}**: it has not been run yet." for name in missing)]
    parts += ["## Sources", "\n".join(f"* {source}" for source in (VLLM, ORCA, DISTSERVE, SARATHI, MOONCAKE))]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def claims(sections: Mapping[str, Section]) -> str:
    """Returns the table of all claims. Raises ValueError if a claim does not hold and no reason is given."""
    rows = []
    for claim in [claim for section in sections.values() for claim in section.claims]:
        if not claim.holds and not claim.why:
            raise ValueError(f"the claim {claim.text!r} does not hold, and no reason is given")
        verdict = "yes" if claim.holds else "**no**"
        rows.append([claim.text, claim.source, claim.theirs, claim.ours, f"{verdict}{claim.why and ': '}{claim.why}"])
    header = ["claim", "source", "theirs", "here", "reproduced"]
    return "## Claims\n\n" + table(header, rows) if rows else ""


def origin_line(name: str, origin: Mapping[str, Any]) -> str:
    isa = ", ".join(origin["isa"])
    return (
        f'`make paper ARGS="--only {name}"`, {origin["date"]}, commit {origin["commit"]}, {origin["cores"]} cores of '
        f"{origin['cpu']} ({isa}), load {origin['load1']} at the start, {origin['seconds']:.0f} s."
    )


def caption(image: str) -> str:
    """Returns the title of an SVG image, or "" if the image has no title."""
    found = re.search(r"<title>(.*?)</title>", image)
    return found[1] if found else ""
