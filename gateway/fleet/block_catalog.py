"""The cached blocks of one tenant, with their token ids, for subscribers that route by cached prefixes.

A ledger has only the prefix hash of a block. A catalog therefore takes token ids from the sequences of its tenant's
requests, and asks the ledgers which blocks of these sequences are in the prefix index. A cached block that no sequence
contains is not listed.

A block is listed only if one arena has the block and all blocks before it. Otherwise, prefill would not find the block,
and a subscriber could not place it without its parent.
"""

from __future__ import annotations

import logging
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress

from block_store.errors import BlockStoreError, StaleDataset
from block_store.ledger.prefix_hash import group_hash, hash_blocks, prompt_chain
from block_store.ledger.scripts import LedgerScripts
from common.kv_retention import KvRules
from common.telemetry import Fallbacks

logger = logging.getLogger("kv_events")
MOST_BLOCKS = 16_384
"""The largest number of blocks that a catalog contains. If there are more, the least recently used blocks are
forgotten.
"""


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """A prompt, or a prompt with an output, whose full blocks may be cached."""

    token_ids: Sequence[int]
    public_tokens: int
    """Number of leading tokens whose full blocks all tenants share."""


@dataclass(frozen=True, slots=True)
class CatalogBlock:
    """A full block of a sequence."""

    prefix_hash: bytes
    parent: bytes | None
    """The prefix hash of the preceding block, or None for a sequence's first block."""
    token_ids: array[int]
    indexed_as: tuple[bytes, ...]
    """The hashes under which the index has the block, one for each KV group that keeps all positions."""


@dataclass(frozen=True, slots=True)
class Arenas:
    """The arenas in which prefill workers find blocks."""

    formats: frozenset[tuple[str, KvRules]] = frozenset()
    """The hash domains (hex) of the workers, each with the workers' KV rules."""
    ledgers: Sequence[LedgerScripts] = ()
    is_complete: bool = True
    """Whether every arena of the workers has a ledger in `ledgers`."""


@dataclass(frozen=True, slots=True)
class Changes:
    """The difference between two lists of blocks: `cleared` applies first, then `removed`, then `stored`."""

    cleared: bool = False
    """Whether all blocks of the earlier list are gone."""
    removed: tuple[bytes, ...] = ()
    """The prefix hashes of blocks that are gone."""
    stored: tuple[CatalogBlock, ...] = ()
    """The new blocks, each after its parent."""

    @property
    def size(self) -> int:
        """The number of blocks, plus 1, because changes without blocks take memory, too."""
        return 1 + len(self.removed) + len(self.stored)


@dataclass(slots=True)
class _Answers:
    """The ledgers' answers about the catalog's blocks."""

    found: list[set[bytes]] = field(default_factory=list)
    """For each arena whose ledger answered, the blocks that are indexed under all hashes of `indexed_as`."""
    stale: set[LedgerScripts] = field(default_factory=set)
    """The ledgers that have been rebuilt or lost."""
    all_answered: bool = True


class BlockCatalog:
    """A list of the cached blocks of one tenant. `update` waits for the ledgers. Calls must not overlap."""

    def __init__(self, salt: bytes, most_blocks: int = MOST_BLOCKS) -> None:
        """`salt` is the salt of the tenant's blocks."""
        self._salt = salt
        self._most_blocks = most_blocks
        self._blocks: OrderedDict[bytes, CatalogBlock] = OrderedDict()
        """The blocks of the sequences, as far as they may be cached, least recently used first. A block follows all
        blocks that continue it, so no block continues the first one.
        """
        self._listed: set[bytes] = set()
        """The blocks that were found in the index."""
        self._usable: set[LedgerScripts] = set()
        """The ledgers that were not stale at the last update."""
        self._clocks: Mapping[LedgerScripts, object] = {}
        """The clocks of the ledgers before the last update, if all ledgers answered and no arena was missing."""
        self._fallbacks = Fallbacks(logger)

    def update(self, sequences: Iterable[TokenSequence], arenas: Arenas) -> Changes:
        """Adds the blocks of `sequences`, and reads from the ledgers which blocks are in their index. Returns the
        changes since the last update.

        A ledger that does not answer counts as a ledger without blocks until it answers again, because workers cannot
        find its blocks either.
        """
        clocks = {ledger: self._clock(ledger) for ledger in arenas.ledgers}
        sequences = list(sequences)
        if not sequences and clocks and clocks == self._clocks:
            return Changes()
        for sequence in sequences:
            self._add(sequence, arenas.formats)
        answers = self._ask(arenas)
        self._clocks = clocks if answers.all_answered and None not in clocks.values() else {}
        usable = set(arenas.ledgers) - answers.stale
        is_cleared, self._usable = not self._usable <= usable and bool(self._listed), usable
        return self._list(answers, is_cleared)

    def everything(self) -> Changes:
        """Returns the changes that lead from any earlier list to the current one."""
        return Changes(cleared=True, stored=tuple(b for h, b in reversed(self._blocks.items()) if h in self._listed))

    def _add(self, sequence: TokenSequence, formats: Iterable[tuple[str, KvRules]]) -> None:
        for domain, rules in formats:
            size = rules.block_size
            groups = [number for number, group in enumerate(rules.groups) if not group.slides]
            if not groups:  # only a few blocks of such a sequence are kept, and no chain leads to them
                continue
            ids = sequence.token_ids[: self._most_blocks * size]
            start, rekey = prompt_chain(bytes.fromhex(domain), self._salt, ids, sequence.public_tokens, size)
            hashes = hash_blocks(start, ids, size, rekey=rekey)
            for place in range(len(hashes) - 1, -1, -1):
                own = hashes[place]
                if own not in self._blocks:
                    self._blocks[own] = CatalogBlock(
                        own,
                        hashes[place - 1] if place else None,
                        array("I", ids[place * size : (place + 1) * size]),
                        tuple(group_hash(own, group) for group in groups),
                    )
                self._blocks.move_to_end(own)
            while len(self._blocks) > self._most_blocks:
                self._blocks.popitem(last=False)

    def _ask(self, arenas: Arenas) -> _Answers:
        answers, blocks = _Answers(), list(self._blocks.values())
        answers.all_answered = arenas.is_complete and bool(arenas.ledgers)
        asked = [each for block in blocks for each in block.indexed_as]
        for ledger in arenas.ledgers:
            try:
                indexed = set(compress(asked, ledger.present(asked)))
            except StaleDataset:
                answers.stale.add(ledger)
                answers.all_answered = False
            except BlockStoreError as error:
                self._fallbacks.note("kv events", f"{type(error).__name__}; blocks of one arena are not announced")
                answers.all_answered = False
            else:
                answers.found.append({b.prefix_hash for b in blocks if indexed.issuperset(b.indexed_as)})
        return answers

    def _list(self, answers: _Answers, is_cleared: bool) -> Changes:
        """Lists the blocks that an arena has together with all their ancestors, and returns the changes. Forgets the
        other blocks, unless an answer is missing.
        """
        before = set() if is_cleared else self._listed
        listed: set[bytes] = set()
        stored: list[CatalogBlock] = []
        # For each arena: its blocks, and a set that receives those whose ancestors it also has.
        reached = [(found, set[bytes]()) for found in answers.found]
        for own, block in reversed(self._blocks.items()):
            for found, whole in reached:
                if own in found and (block.parent is None or block.parent in whole):
                    whole.add(own)
                    listed.add(own)
            if own in listed and own not in before:
                stored.append(block)
        if answers.all_answered:
            for own in [own for own in self._blocks if own not in listed]:
                del self._blocks[own]
        self._listed = listed
        return Changes(is_cleared, tuple(before - listed), tuple(stored))

    def _clock(self, ledger: LedgerScripts) -> object:
        try:
            return ledger.clock()
        except BlockStoreError:
            return None
