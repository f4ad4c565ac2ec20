"""The encoding of the ledger scripts' arguments and replies."""

from __future__ import annotations

import struct

import pytest

from block_store.ledger import codec
from block_store.ledger.codec import SealItem
from common.types import BlockRef, CacheQuota

REFS = [BlockRef(1, 2), BlockRef((1 << 32) - 1, (1 << 64) - 1), BlockRef(0, 0)]


def test_references_come_back() -> None:
    packed = codec.pack_refs(REFS)
    assert len(packed) == 12 * len(REFS) and codec.unpack_refs(packed) == REFS


@pytest.mark.parametrize("num_missing", range(4))
def test_both_lists_of_a_report_come_back(num_missing: int) -> None:
    missing, surplus = REFS[:num_missing], REFS[num_missing:]
    assert codec.unpack_report(codec.pack_report(missing, surplus)) == (missing, surplus)


def test_items_name_their_quotas_by_place() -> None:
    one, other = CacheQuota(b"1" * 32, 5), CacheQuota(b"2" * 32, 100)
    quotas = [other, None, one, other]
    items = [SealItem(REFS[0], bytes([i]) * 32, quota) for i, quota in enumerate(quotas)] + [SealItem(REFS[1])]
    packed, named = codec.pack_items(items)
    each = [packed[at : at + 47] for at in range(0, len(packed), 47)]
    assert [int.from_bytes(item[45:], "little") for item in each] == [1, 0, 2, 1, 0]
    assert [item[12] for item in each] == [1, 1, 1, 1, 0], "the last one is partial"
    assert each[1][13:45] == b"\1" * 32
    assert named == b"2" * 32 + struct.pack("<I", 100) + b"1" * 32 + struct.pack("<I", 5)


def test_a_prefix_comes_back_by_group() -> None:
    packed = struct.pack("<I", 1) + codec.pack_refs(REFS[:2])
    assert codec.unpack_prefix(packed, 2) == [[REFS[0]], [REFS[1]]]
    assert codec.unpack_prefix(struct.pack("<I", 0), 2) == [[], []]


def test_hashes_are_whole() -> None:
    packed = codec.pack_hashes([[b"a" * 32, b"b" * 32], []])
    assert packed == struct.pack("<II", 2, 2) + b"a" * 32 + b"b" * 32 + struct.pack("<I", 0)
    with pytest.raises(ValueError, match="a prefix hash has 32 bytes"):
        codec.pack_hashes([[b"a" * 31]])
