"""Deaths are counted once for each worker's life, and forgotten when the request completes."""

from __future__ import annotations

import pytest

from common.errors import Internal
from gateway.poison import MOST_REMEMBERED, PoisonList, digest_of

DIGEST = digest_of([1, 2, 3], b"salt")


def test_two_deaths_of_different_workers_make_a_request_poison() -> None:
    poison = PoisonList()
    for _ in range(5):  # five equal requests lost the same worker
        poison.died(DIGEST, "d0@1")
        poison.check(DIGEST)
    poison.died(DIGEST, "d0@2")
    with pytest.raises(Internal):
        poison.check(DIGEST)
    poison.check(digest_of([1, 2, 3], b"another tenant"))


def test_what_completes_is_forgotten_and_so_is_what_is_old() -> None:
    poison = PoisonList()
    poison.died(DIGEST, "a")
    poison.completed(DIGEST)
    poison.died(DIGEST, "b")
    poison.check(DIGEST)
    poison.died(DIGEST, "c")
    for number in range(MOST_REMEMBERED):
        poison.died(digest_of([number], b""), "d")
    poison.check(DIGEST)
