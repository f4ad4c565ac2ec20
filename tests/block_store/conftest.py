"""A private Redis for the whole run, and a fresh store for each test."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from block_store import redis_server
from block_store.redis_server import RedisHandle
from block_store.testing import TestStore


@pytest.fixture
def shm() -> Iterator[Path]:
    """A short directory on shared memory."""
    directory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="ll-test-"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def redis_handle() -> Iterator[RedisHandle]:
    directory = tempfile.mkdtemp(prefix="ll-redis-")
    handle = redis_server.connect(None, directory)
    yield handle
    handle.close()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def store(redis_handle: RedisHandle, shm: Path) -> Iterator[TestStore]:
    made = TestStore(redis_handle.client, shm)
    yield made
    made.close()
