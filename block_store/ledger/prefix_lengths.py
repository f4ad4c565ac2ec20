"""Finds how much of a prompt is cached in each of many arenas, with one script call for up to MOST_ARENAS arenas."""

from __future__ import annotations

from collections.abc import Sequence

import redis

from block_store.ledger.lua_library import source
from block_store.ledger.replies import reading
from block_store.ledger.scripts import LedgerScripts, answering

NAME = "prefix_lengths"
MOST_ARENAS = 128
"""Maximum number of arenas per call, because a script blocks the server while it runs."""


class PrefixLengths:
    """A reader of the prefix indexes of all arenas whose ledgers are in one Redis server. It takes no references."""

    def __init__(self, client: redis.Redis) -> None:
        self._script = client.register_script(source(NAME))

    def find(self, ledgers: Sequence[LedgerScripts], hashes: Sequence[bytes]) -> list[int | None]:
        """Returns, for each ledger, how many of the leading `hashes` are indexed, found by binary search, or None if
        the ledger has a different dataset generation or is damaged. Raises LedgerUnavailable if Redis does not answer,
        and LedgerDamaged if the script fails.
        """
        lengths: list[int | None] = []
        for start in range(0, len(ledgers), MOST_ARENAS):
            part = ledgers[start : start + MOST_ARENAS]
            keys, datasets = [each.tag + "meta" for each in part], [each.dataset for each in part]
            with answering(NAME):
                found = self._script(keys=keys, args=[b"".join(hashes), *datasets])
            with reading(NAME):
                lengths += [None if length < 0 else min(length, len(hashes)) for length in map(int, found)]
        return lengths
