"""Writes docs/clients.md with the results of the last run of all clients."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.third_party.install import Client

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "clients.md"
_HEAD = """\
# Clients

This page shows which third-party clients work with Looseleaf. `make test-third-party` installs each client, unmodified,
in a separate directory below `~/.cache/looseleaf-clients` (or `$LOOSELEAF_CLIENTS`). It runs the scripts in
`tests/third_party/clients` against a server with the built-in model, and writes this page, so do not edit it. The tests
of tools use the same weights with a chat template of the Hermes family, because the built-in model's own template does
not support tools ([chat.md](chat.md)).

The column "works" lists the features that behaved as users expect. The column "limits" lists the features that the
server refuses (the scripts check this too) and remarks about the client.

"""


@dataclass(slots=True)
class Row:
    """The result of one client."""

    client: Client
    tried: list[dict[str, Any]] = field(default_factory=list)
    """Lines of a script: `what`, `remark`, `refused` and `error`."""
    missing: str | None = None
    """The reason why the client is not installed, or None."""

    def note(self, what: str, error: str | None) -> None:
        """Adds a result from outside the script. `error` is None if the result is as expected."""
        self.tried.append({"what": what, "remark": "", "refused": False, "error": error})

    @property
    def failures(self) -> list[str]:
        """The failed features, with the reasons."""
        return [f"{line['what']}: {line['error']}" for line in self.tried if line["error"] is not None]

    def cells(self) -> list[str]:
        """Returns the row's cells."""
        if self.missing is not None:
            return [self.client.title, "-", "", f"not installed: {self.missing}", ""]
        good = [line for line in self.tried if line["error"] is None]
        result = f"{len(good)} of {len(self.tried)}"
        if self.failures:
            result += ", failed: " + "; ".join(line["what"] for line in self.tried if line["error"] is not None)
        does = [line["what"] for line in good if not line["refused"]]
        limits = [f"refused: {line['what']}" for line in good if line["refused"]]
        limits += [line["remark"] for line in self.tried if line["remark"]]
        return [self.client.title, self.client.version, result, "; ".join(does), "; ".join(limits)]


def write(rows: Sequence[Row]) -> None:
    """Writes the page."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    now = datetime.now(UTC).strftime("%Y-%m-%d")
    lines = ["| client | version | passed | works | limits |", "|---|---|---|---|---|"]
    lines += [
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row.cells()) + " |" for row in rows
    ]
    where = f"`make test-third-party`, {now}, commit {commit.strip()} and this page, Python {platform.python_version()}"
    PAGE.write_text(f"{_HEAD}Run: {where}.\n\n" + "\n".join(lines) + "\n", encoding="utf-8")
