"""Fixtures: a small set of requests, and a deployment for tests that do not damage it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from testing.chaos import central, garbled, held, kills, outages
from testing.chaos.book import make_book, make_model
from testing.chaos.run import Run
from testing.chaos.stack import Stack


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make chaos` judges times, on a quiet machine. These tests run on any machine."""
    monkeypatch.setattr(kills, "GAP_MOST_S", 60.0)
    monkeypatch.setattr(held, "MERCY_S", 60.0)
    monkeypatch.setattr(outages, "WHOLE_S", 60.0)
    monkeypatch.setattr(garbled, "WHOLE_S", 60.0)
    monkeypatch.setattr(central, "BACK_MOST_S", 60.0)
    monkeypatch.setattr(central, "RECONNECT_S", 20.0)


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of one trial."""
    model = make_model(tmp_path_factory.mktemp("models") / "tiny-llama")
    return Run(model, make_book(model, 12, seed=5, output_lengths=(16, 96)), trials=1, seed=5)


@pytest.fixture(scope="module")
def stack(run: Run) -> Iterator[Stack]:
    with run.stack() as running:
        yield running
