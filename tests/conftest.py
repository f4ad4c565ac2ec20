"""Fixtures of all tests."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from engine.device import settle_vector_math


@pytest.fixture(autouse=True, scope="session")
def same_choices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The services that a test starts use the linear layers that the test's own process uses. Each process measures
    which ones are faster. On a busy machine, two processes can measure differently, and then the services' tokens are
    not those of the test's oracle.
    """
    with pytest.MonkeyPatch.context() as patch:
        if "KERNELS_CHOICES" not in os.environ:
            patch.setenv("KERNELS_CHOICES", str(tmp_path_factory.mktemp("choices")))
        yield


@pytest.fixture(autouse=True, scope="session")
def exact_references() -> None:
    """The models that tests compare with compute in this process, some of them before an engine does."""
    settle_vector_math()


@pytest.fixture(autouse=True)
def no_holder_is_left() -> Iterator[None]:
    """Fails a test that leaves a holder of blocks with its beat thread: when the ledger of a later test is new, that
    thread logs a warning in the later test.
    """
    before = set(threading.enumerate())
    yield
    left = [thread.name for thread in threading.enumerate() if thread not in before and "beat-" in thread.name]
    assert not left, f"the test has left the threads {left}"
