"""Computes prefix hashes: a SHA-256 chain over the domain, a salt, and for each full block the parent hash, the token
ids and other input of the block.

The salt separates the blocks of different tenants. Every field is preceded by its length, so that different inputs give
different bytes to hash.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from sys import byteorder

from common.types import PrefixHash

HASH_BYTES = 32
Rekey = tuple[int, bytes]
"""The index of a block, and the parent hash to use for it instead of the hash of the preceding block."""


def _digest(kind: bytes, fields: Sequence[bytes]) -> bytes:
    state = hashlib.sha256(b"looseleaf/" + kind + b"\0")
    for field in fields:
        state.update(len(field).to_bytes(8, "little"))
        state.update(field)
    return state.digest()


def hash_domain(model_fingerprint: bytes, group: int, layout_fingerprint: bytes, numerics: str) -> bytes:
    """Returns the hash domain of one KV group (docs/design.md, Blocks and the arena: hash domain). Blocks of a
    different model, layout or numerics can have different bits.
    """
    return _digest(b"domain", (model_fingerprint, group.to_bytes(4, "little"), layout_fingerprint, numerics.encode()))


def adapter_domain(domain: bytes, adapter: bytes) -> bytes:
    """Returns the hash domain of sequences that use the adapter with digest `adapter`, or `domain` if the digest is
    empty (the base model). Blocks that were computed with different adapters have different hashes.
    """
    return _digest(b"adapter", (domain, adapter)) if adapter else domain


def chain_start(domain: bytes, salt: bytes = b"") -> bytes:
    """Returns the parent hash of a sequence's first block. Different salts give different hashes."""
    return _digest(b"start", (domain, salt))


def prompt_chain(
    domain: bytes, salt: bytes, token_ids: Sequence[int], public_tokens: int, block_size: int
) -> tuple[bytes, Rekey | None]:
    """Returns the start of a prompt's chain, and the rekey that binds the chain to `salt` after the public blocks. The
    rekey is None if there are no public blocks, or if `salt` is empty.

    Full blocks within the prompt's first `public_tokens` tokens have the same hashes for all tenants. The hashes of all
    later blocks depend on those blocks and on the salt.
    """
    num_public = public_tokens // block_size if salt else 0
    if not num_public:
        return chain_start(domain, salt), None
    start = chain_start(domain)
    public = hash_blocks(start, token_ids[: num_public * block_size], block_size)
    return start, (num_public, _digest(b"private", (public[-1], salt)))


def next_hash(parent: bytes, token_ids: Sequence[int], extra: bytes = b"") -> PrefixHash:
    """Returns the hash of the full block that contains `token_ids` (each as little-endian u32) after `parent`.

    `extra` identifies other input that determines the block's content. Raises OverflowError if an id does not fit into
    u32.
    """
    ids = array("I", token_ids)
    if byteorder == "big":
        ids.byteswap()
    return PrefixHash(_digest(b"block", (parent, ids.tobytes(), extra)))


def group_hash(block_hash: bytes, group: int) -> bytes:
    """Returns the hash under which a block of KV group `group` is indexed. `block_hash` is the block's hash in the
    chain, which is also its hash for group 0.
    """
    return block_hash if group == 0 else _digest(b"group", (block_hash, group.to_bytes(4, "little")))


def hash_blocks(
    parent: bytes, token_ids: Sequence[int], block_size: int, extra: bytes = b"", rekey: Rekey | None = None
) -> list[PrefixHash]:
    """Returns the hashes of the full blocks of `token_ids`, in order; a partial last block has no hash.

    `parent` is `chain_start(...)` or the hash of the block before `token_ids[0]`. `rekey` replaces the parent hash of
    one block.
    """
    hashes: list[PrefixHash] = []
    for end in range(block_size, len(token_ids) + 1, block_size):
        if rekey is not None and rekey[0] == len(hashes):
            parent = rekey[1]
        parent = next_hash(parent, token_ids[end - block_size : end], extra)
        hashes.append(PrefixHash(parent))
    return hashes
