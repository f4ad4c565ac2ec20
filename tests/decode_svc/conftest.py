"""Fixtures: a tiny model of 3 layers with two block sizes, a private Redis per module, a new worker for each test."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from block_store.redis import redis_server
from engine.model_runner import ModelRunner, RunnerSettings
from engine.tiny import make_checkpoint
from testing.decode import DecodeBench
from testing.ledger.store import patient

NewRunner = Callable[[int], ModelRunner]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def small_runner(model: Path) -> ModelRunner:
    """A runner with blocks of 4 tokens."""
    return ModelRunner(RunnerSettings(model, num_threads=1, max_model_len=256, device="cpu", block_size=4))


@pytest.fixture(scope="module")
def ordinary_runner(model: Path) -> ModelRunner:
    """A runner with blocks of 16 tokens."""
    return ModelRunner(RunnerSettings(model, num_threads=1, max_model_len=256, device="cpu"))


@pytest.fixture(scope="module")
def redis_client() -> Iterator[Any]:
    with tempfile.TemporaryDirectory(prefix="ll-redis-") as directory:
        redis = redis_server.connect(None, directory)
        yield patient(redis.client)
        redis.close()


@pytest.fixture
def small(small_runner: ModelRunner, redis_client: Any, tmp_path: Path) -> Iterator[DecodeBench]:
    made = DecodeBench(small_runner, tmp_path, redis_client)
    yield made
    made.close()


@pytest.fixture
def ordinary(ordinary_runner: ModelRunner, redis_client: Any, tmp_path: Path) -> Iterator[DecodeBench]:
    made = DecodeBench(ordinary_runner, tmp_path, redis_client)
    yield made
    made.close()
