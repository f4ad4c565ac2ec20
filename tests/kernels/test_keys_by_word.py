"""Keys that are stored by word: attention has the bits that it has with keys in rows, and writes go to the right
words.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.kv_cache import by_word, check_keys, has_words, rows_of
from kernels.paged_attention import paged_attention
from kernels.paged_prefill import paged_prefill
from kernels.write_blocks import write_blocks

DTYPES = (torch.float32, torch.bfloat16)


def with_words(case: Any) -> Any:
    """Returns the case with a copy of its keys that is stored by word. Slots without a key stay poisoned."""
    keys = by_word(torch.empty_like(case.key_cache).contiguous())
    keys.transpose(2, 3).copy_(case.key_cache.unflatten(3, (-1, keys.shape[4])))
    return replace(case, key_cache=keys)


def where(case: Any) -> tuple[torch.Tensor, ...]:
    return case.key_cache, case.value_cache, case.block_table, case.context_lens


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", [{}, {"window": 50}, {"softcap": 5.0}], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "d", "block_size"), [(12, 4, 64, 16), (7, 1, 24, 48), (2, 2, 256, 32), (40, 2, 80, 16)])  # fmt: skip  # noqa: E501
def test_decode_and_prefill_have_the_bits_of_rows(isa: str, scatter: Any, dtype: torch.dtype, how: dict[str, Any], heads: int, kv_heads: int, d: int, block_size: int) -> None:  # fmt: skip  # noqa: E501
    """Few rows take keys as they are stored, and many rows copy them."""
    lens, chunks = [300, 17, 1, 600, 0, 255], [150, 5, 1, 2, 0, 255]
    in_rows = scatter(lens, kv_heads, d, block_size, dtype, window=how.get("window", 0) + 300 * ("window" in how))
    by_words = with_words(in_rows)
    options = {"softmax_scale": d**-0.5, **how}
    q = torch.randn(len(lens), heads, d).to(dtype)
    decoded = [paged_attention(q, *where(case), **options) for case in (in_rows, by_words)]
    assert torch.equal(*decoded) and decoded[0].isfinite().all()
    q = torch.randn(sum(chunks), heads, d).to(dtype)
    cu = torch.tensor([0, *torch.tensor(chunks).cumsum(0).tolist()], dtype=torch.int32)
    filled = [paged_prefill(q, *where(case), cu, **options) for case in (in_rows, by_words)]
    assert torch.equal(*filled) and filled[0].isfinite().all()


@pytest.mark.parametrize("threads", [1, 2])
def test_shared_pieces_have_the_bits_of_rows(native_isa: str, scatter: Any, threads: int) -> None:
    torch.set_num_threads(threads)
    case = scatter([700], 2, 64, 16, torch.bfloat16)
    alike = replace(
        case, block_table=case.block_table.expand(9, -1).contiguous(),
        context_lens=torch.tensor([700, 699, 513, 512, 511, 256, 255, 3, 640], dtype=torch.int32),
    )  # fmt: skip
    q = torch.randn(9, 6, 64).bfloat16()
    found = [paged_attention(q, *where(each), softmax_scale=0.125) for each in (alike, with_words(alike))]
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "d", "rotary"), [(4, 2, 64, 64), (5, 5, 80, 32)])
def test_writes_the_keys_of_rows(isa: str, dtype: torch.dtype, heads: int, kv_heads: int, d: int, rotary: int) -> None:
    tokens, shape = 37, (9, kv_heads, 16, d)
    q, k, v = (torch.randn(tokens, n, d).to(dtype) for n in (heads, kv_heads, kv_heads))
    positions, slots = torch.randint(0, 500, (tokens,)), torch.randperm(9 * 16)[:tokens]
    slots[5] = -1
    cos_sin = torch.rand(500, rotary)
    rows, words, values = (torch.full(shape, 7.0, dtype=dtype) for _ in range(3))
    write_blocks(q.clone(), k, v, positions, slots, rows, values, cos_sin)
    write_blocks(q, k, v, positions, slots, by_word(words), values, cos_sin)
    assert torch.equal(rows_of(by_word(words)), rows) and not torch.equal(words, rows)


def test_refuses_keys_that_do_not_fit(native_isa: str) -> None:
    values = torch.zeros(3, 2, 16, 64).bfloat16()
    check_keys(by_word(values.clone()), values)
    assert has_words(torch.float32, 48) and not has_words(torch.bfloat16, 8) and not has_words(torch.int8, 16)
    small = values.view(3, 2, 8, 128)
    for keys, others, message in (
        (by_word(values), values[:2], "does not fit"),
        (by_word(values).transpose(2, 3).contiguous().transpose(2, 3), values, "not contiguous"),
        (by_word(small), small, "cannot be stored by word"),
        (values, small, "differ in shape"),
    ):
        with pytest.raises(ValueError, match=message):
            check_keys(keys, others)
