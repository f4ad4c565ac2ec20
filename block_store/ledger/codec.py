"""Packs references, hashes and seal items for the ledger's scripts, and unpacks the scripts' replies."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from block_store.ledger.prefix_hash import HASH_BYTES
from common.types import BlockRef, CacheQuota

_REF = struct.Struct("<IQ")
_ITEM = struct.Struct("<IQB32sH")
_QUOTA = struct.Struct("<32sI")
_NO_HASH = bytes(HASH_BYTES)


@dataclass(frozen=True, slots=True)
class SealItem:
    """A block to seal, whose content is final. A full block has a prefix hash; a partial block has none."""

    ref: BlockRef
    prefix_hash: bytes | None = None
    quota: CacheQuota | None = None
    """Quota of the tenant that owns the block. If it is None, the block counts against no quota."""


def pack_refs(refs: Iterable[BlockRef]) -> bytes:
    return b"".join(_REF.pack(block, generation) for block, generation in refs)


def unpack_refs(packed: bytes, num_refs: int | None = None) -> list[BlockRef]:
    """Returns the references in `packed`. Raises ValueError or struct.error if `packed` does not contain exactly
    `num_refs` references. If `num_refs` is None, any number is accepted.
    """
    refs = [BlockRef(block, generation) for block, generation in _REF.iter_unpack(packed)]
    if num_refs is not None and len(refs) != num_refs:
        raise ValueError(f"{len(refs)} references instead of {num_refs}")
    return refs


def pack_items(items: Iterable[SealItem]) -> tuple[bytes, bytes]:
    """Returns the packed items and the packed quotas. An item contains the position of its quota, counted from 1, or 0
    if the item has no quota.
    """
    places: dict[CacheQuota | None, int] = {None: 0}
    packed = b"".join(
        _ITEM.pack(
            item.ref.block, item.ref.generation, item.prefix_hash is not None, item.prefix_hash or _NO_HASH,
            places.setdefault(item.quota, len(places)),
        )
        for item in items
    )  # fmt: skip
    return packed, b"".join(_QUOTA.pack(quota.owner, quota.percent) for quota in places if quota is not None)


def pack_hashes(hashes_by_group: Sequence[Sequence[bytes]]) -> bytes:
    """Packs the number of groups as a u32, followed for each group by the number of its hashes as a u32, and the
    hashes.

    Raises ValueError if a hash does not have 32 bytes.
    """
    parts = [struct.pack("<I", len(hashes_by_group))]
    for hashes in hashes_by_group:
        packed = b"".join(hashes)
        if any(len(one) != HASH_BYTES for one in hashes):
            raise ValueError(f"a prefix hash has {HASH_BYTES} bytes")
        parts += [struct.pack("<I", len(hashes)), packed]
    return b"".join(parts)


def pack_report(missing: Sequence[BlockRef], surplus: Sequence[BlockRef]) -> bytes:
    """Packs the length of `missing` as a u32, followed by the references of both lists."""
    return struct.pack("<I", len(missing)) + pack_refs(missing) + pack_refs(surplus)


def unpack_report(packed: bytes) -> tuple[list[BlockRef], list[BlockRef]]:
    """Returns the two lists that `pack_report` has packed."""
    (num_missing,) = struct.unpack_from("<I", packed)
    refs = unpack_refs(packed[4:])
    return refs[:num_missing], refs[num_missing:]


def unpack_prefix(packed: bytes, num_groups: int) -> list[list[BlockRef]]:
    """Unpacks the reply of `acquire`: a u32 length, then `length` references per group."""
    (length,) = struct.unpack_from("<I", packed)
    refs = unpack_refs(packed[4:], num_groups * length)
    return [refs[group * length : (group + 1) * length] for group in range(num_groups)]
