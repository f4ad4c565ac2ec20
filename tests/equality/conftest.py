"""What both suites in one process need: a Redis."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

from block_store import redis_server


@pytest.fixture(scope="module")
def redis_client() -> Iterator[Any]:
    with tempfile.TemporaryDirectory(prefix="ll-redis-") as directory:
        redis = redis_server.connect(None, directory)
        yield redis.client
        redis.close()
