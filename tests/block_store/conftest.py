"""Fixtures: a private Redis for the whole run, a new store for each test, and a stand-in for the CUDA driver."""

from __future__ import annotations

import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from block_store.arena.cuda import Cuda
from block_store.redis import redis_server
from block_store.redis.redis_server import RedisHandle
from testing.ledger.store import TestStore, patient


@pytest.fixture
def shm() -> Iterator[Path]:
    """A directory in shared memory with a short path."""
    directory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="ll-test-"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def redis_handle() -> Iterator[RedisHandle]:
    directory = tempfile.mkdtemp(prefix="ll-redis-")
    handle = redis_server.connect(None, directory, confined=False)
    patient(handle.client)
    yield handle
    handle.close()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def store(redis_handle: RedisHandle, shm: Path) -> Iterator[TestStore]:
    made = TestStore(redis_handle.client, shm)
    yield made
    made.close()


@pytest.fixture(scope="session")
def cuda_library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of the compiled stand-in for libcuda.so.1."""
    library = tmp_path_factory.mktemp("cuda") / "libcuda.so"
    source = Path(__file__).parent / "stand_in_cuda.c"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source, "-lpthread", "-lrt"], check=True)
    return str(library)


@pytest.fixture
def gpus(cuda_library: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    """The driver of a machine with one empty GPU of 64 MiB, which the other processes of the test see too."""
    prefix = f"ll-cuda-{secrets.token_hex(4)}"
    monkeypatch.setenv("STAND_IN_CUDA", prefix)
    yield Cuda(cuda_library)
    for left in Path("/dev/shm").glob(f"{prefix}-*"):
        left.unlink()
