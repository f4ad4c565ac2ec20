"""Fixtures: the servers for the clients, and the page with the results.

A run of all clients writes docs/clients.md. A client that cannot be installed is skipped, and the page says so.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from looseleaf import LLM
from testing.gateway.tool_templates import HERMES
from tests.third_party.install import CLIENTS
from tests.third_party.page import Row, write

ROOT = Path(__file__).resolve().parents[2]
STORYTELLER = ROOT / "models" / "storyteller"
ROWS: dict[str, Row] = {}


@pytest.fixture(scope="session")
def builtin() -> Iterator[LLM]:
    """A server with the built-in model, like `looseleaf serve --vllm-grpc`."""
    with LLM(num_blocks=4096, vllm_grpc=True) as running:
        yield running


@pytest.fixture(scope="session")
def with_tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A server with the built-in model's weights and a chat template that supports tools. The model's own template does
    not.
    """
    directory = tmp_path_factory.mktemp("models") / "storyteller"
    shutil.copytree(STORYTELLER, directory, ignore=shutil.ignore_patterns("SHA256SUMS"))
    (directory / "chat_template.jinja").write_text(HERMES, encoding="utf-8")
    with LLM(str(directory), num_blocks=4096, vllm_grpc=True) as running:
        yield running


@pytest.fixture(scope="session")
def rows() -> Iterator[dict[str, Row]]:
    """The page's rows so far, by client. When all clients have a row, the page is written."""
    yield ROWS
    if set(ROWS) == {client.name for client in CLIENTS}:
        write([ROWS[client.name] for client in CLIENTS])
