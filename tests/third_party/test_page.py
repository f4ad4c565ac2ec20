"""docs/clients.md lists the current clients of the suite. These tests install nothing."""

from __future__ import annotations

from pathlib import Path

from tests.third_party.install import CLIENTS, Client
from tests.third_party.page import PAGE, Row

SCRIPTS = Path(__file__).parent / "clients"


def test_every_client_has_a_row_and_the_pinned_version() -> None:
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")][1:]
    assert [row[0].removeprefix("| ") for row in rows] == [client.title for client in CLIENTS]
    for client, row in zip(CLIENTS, rows, strict=True):
        assert client.kind == "deb" or row[1] in (client.version, "-"), f"{client.name}: make test-third-party"


def test_every_script_belongs_to_a_client() -> None:
    assert {path.name for path in SCRIPTS.glob("use_*")} == {client.script for client in CLIENTS}


def test_a_failure_shows_in_the_row() -> None:
    line = {"what": "chat", "remark": "", "refused": False, "error": None}
    client = Client("openai", "openai", "pip", ("openai==1",), "use_openai.py")
    row = Row(client, [line, {**line, "what": "tools", "error": "AssertionError"}])
    assert row.cells() == ["openai", "1", "1 of 2, failed: tools", "chat", ""]
    row.missing = "no network"
    assert row.cells()[3] == "not installed: no network"
