"""Fixtures: one real stack (Redis, block store, workers and gateway as processes) for each module that needs it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.tiny import make_checkpoint
from looseleaf import LLM, metrics_page
from testing.ledger.store import wait_until


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama in bf16. Its weights have a large deviation, so a wrong KV block changes tokens."""
    directory = tmp_path_factory.mktemp("models") / "tiny-llama"
    make_checkpoint(directory, "llama", seed=1, dtype=torch.bfloat16, max_position_embeddings=8192)
    return directory


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    """A system with one prefill and one decode worker."""
    with LLM(str(checkpoint), num_blocks=4096, max_model_len=8192, block_size=16, roles="split") as running:
        yield running


@pytest.fixture(scope="module")
def two_by_two(checkpoint: Path) -> Iterator[LLM]:
    """A system with two prefill and two decode workers, all of which the gateway knows. It serves as soon as it knows
    one of each.
    """

    def known_workers() -> int:
        samples = metrics_page.read(running.addresses.http)
        return sum(sample.name == "looseleaf_worker_running" for sample in samples)

    with LLM(str(checkpoint), num_blocks=4096, max_model_len=2048, roles="split", prefill=2, decode=2) as running:
        wait_until(lambda: known_workers() == 4)
        yield running
