from __future__ import annotations

import hashlib
import struct

import pytest

from block_store.ledger.prefix_hash import chain_start, hash_blocks, hash_domain, next_hash, prompt_chain


def test_only_full_blocks_have_a_hash() -> None:
    start = chain_start(b"domain")
    for length, blocks in ((0, 0), (3, 0), (4, 1), (7, 1), (8, 2)):
        assert len(hash_blocks(start, range(length), 4)) == blocks


def test_the_chain_goes_on_from_any_block() -> None:
    start = chain_start(b"domain", b"salt")
    whole = hash_blocks(start, range(12), 4)
    assert hash_blocks(whole[0], range(4, 12), 4) == whole[1:]
    assert next_hash(start, range(4)) == whole[0]


def test_bytes_are_sha256_of_lengths_and_little_endian_ids() -> None:
    ids = struct.pack("<3I", 1, 256, 2**32 - 1)
    fields = b"".join(len(f).to_bytes(8, "little") + f for f in (b"parent", ids, b"extra"))
    assert next_hash(b"parent", [1, 256, 2**32 - 1], b"extra") == hashlib.sha256(b"looseleaf/block\0" + fields).digest()


def test_everything_that_makes_other_bits_makes_another_hash() -> None:
    domains = {
        hash_domain(model, group, layout, numerics)
        for model in (b"a", b"b") for group in (0, 1) for layout in (b"x", b"y") for numerics in ("bf16", "fp32")
    }  # fmt: skip
    assert len(domains) == 16
    starts = {chain_start(d, salt) for d in domains for salt in (b"", b"t1", b"t2")}
    assert len(starts) == 48
    assert len({next_hash(s, [1], extra) for s in starts for extra in (b"", b"lora")}) == 96


@pytest.mark.parametrize("bad", [-1, 2**32])
def test_ids_outside_u32_are_refused(bad: int) -> None:
    with pytest.raises(OverflowError):
        next_hash(b"", [bad])


def test_public_blocks_are_everybodys_and_what_follows_is_bound_to_the_salt() -> None:
    ids = list(range(100, 180))
    plain = hash_blocks(chain_start(b"domain"), ids, 16)
    own = hash_blocks(chain_start(b"domain", b"a"), ids, 16)
    seen = [*plain, *own]
    for public_tokens, num_public in ((0, 0), (15, 0), (16, 1), (47, 2), (48, 3), (80, 5)):
        chains = []
        for salt in (b"a", b"b"):
            start, rekey = prompt_chain(b"domain", salt, ids, public_tokens, 16)
            chains.append(hash_blocks(start, ids, 16, rekey=rekey))
        assert chains[0][:num_public] == chains[1][:num_public] == plain[:num_public]
        private = [block for chain in chains for block in chain[num_public:]]
        assert len(set(private)) == len(private)
        if num_public:
            assert not set(private) & set(seen)
            seen += private
        else:
            assert chains[0] == own
    assert prompt_chain(b"domain", b"", ids, 48, 16) == (chain_start(b"domain"), None), "no tenant, nothing private"
