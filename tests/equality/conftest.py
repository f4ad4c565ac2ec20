"""Fixtures of the tests with workers in this process: a private Redis, and a directory in shared memory."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from block_store.redis import redis_server
from testing.ledger.store import patient


@pytest.fixture
def shm() -> Iterator[Path]:
    """A directory in shared memory with a short path."""
    directory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="ll-test-"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def redis_client() -> Iterator[Any]:
    with tempfile.TemporaryDirectory(prefix="ll-redis-") as directory:
        redis = redis_server.connect(None, directory)
        yield patient(redis.client)
        redis.close()
