"""A fixture of all tests: the services that a test starts use the linear layers that the test's own process uses.

Each process measures which ones are faster. On a busy machine, two processes can measure differently, and then the
services' tokens are not those of the test's oracle.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def same_choices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if "KERNELS_CHOICES" not in os.environ:
            patch.setenv("KERNELS_CHOICES", str(tmp_path_factory.mktemp("choices")))
        yield
