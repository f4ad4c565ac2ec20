"""Formats of the rows of a KV cache. A row contains the key or the value of one token and head, in the queries' dtype
or in 8 bits.

Row formats, by the cache's dtype:

* bfloat16, float16, float32: head_dim numbers.
* float8_e4m3fn: head_dim numbers, rounded to nearest even, and saturated at +-448. There is no scale, as in vLLM by
  default.
* int8: head_dim integers in [-127, 127], then their scale, an fp32 number: the row's largest magnitude / 127.

A row depends only on one token's key or value, so its bytes are the same in any chunk, and a block can be copied as it
is.

On a CPU, the keys of a block are stored by word where `has_words` permits: [num_kv_heads, head_dim / x, block_size, x],
with x elements in 32 bits. A vector of keys is then contiguous, so attention need not transpose keys. vLLM's first
kernels had such a layout of keys, with x elements in 16 bytes (Kwon et al. 2023).
"""

from __future__ import annotations

import torch
from torch import Tensor

EIGHT_BITS = (torch.int8, torch.float8_e4m3fn)
SCALE_BYTES = {torch.int8: 4}
E4M3_MAX = 448.0
LEAST_MAGNITUDE = 2.0**-100
"""An int8 row whose largest magnitude is smaller than this is stored as zeros, because 127 divided by it might
overflow.
"""


WORD_BYTES = 4
VECTOR_KEYS = 16
"""The number of keys in the longest vector. A vector that is stored by word must not cross the end of a block."""


def has_words(dtype: torch.dtype, block_size: int) -> bool:
    """Returns whether keys of this dtype can be stored by word in blocks of this size."""
    return dtype in (torch.bfloat16, torch.float32) and block_size % VECTOR_KEYS == 0


def by_word(keys: Tensor) -> Tensor:
    """Returns the view [num_blocks, num_kv_heads, head_dim / x, block_size, x] of memory for keys that has the shape
    [num_blocks, num_kv_heads, block_size, head_dim]. Its last two dimensions must be contiguous.
    """
    size, width = keys.shape[2], WORD_BYTES // keys.element_size()
    return keys.flatten(2).unflatten(2, (-1, size, width))


def is_by_word(keys: Tensor) -> bool:
    """Returns whether keys have the shape of those that are stored by word."""
    return keys.dim() == 5


def check_keys(keys: Tensor, values: Tensor) -> None:
    """Raises ValueError unless the keys have the shape of the values or are stored by word."""
    if not is_by_word(keys):
        if keys.shape != values.shape:
            raise ValueError("key_cache and value_cache differ in shape")
        return
    blocks, heads, size, head_dim = values.shape
    width = WORD_BYTES // keys.element_size()
    if not has_words(keys.dtype, size):
        raise ValueError(f"keys of {keys.dtype} in blocks of {size} tokens cannot be stored by word")
    if keys.shape != (blocks, heads, head_dim // width, size, width) or keys.stride()[2:] != (size * width, width, 1):
        raise ValueError("key_cache, stored by word, does not fit value_cache or is not contiguous in a head")


def rows_of(cache: Tensor) -> Tensor:
    """Returns a cache as rows [num_blocks, num_kv_heads, block_size, row_width]. Copies keys that are stored by word,
    unless they are fp32.
    """
    return cache.transpose(2, 3).flatten(3) if is_by_word(cache) else cache


def row_width(head_dim: int, dtype: torch.dtype) -> int:
    """Returns the size of a cache's last dimension, in elements."""
    return head_dim + SCALE_BYTES.get(dtype, 0)


def head_dim_of(cache: Tensor) -> int:
    """Returns the head dimension of the keys or values in a cache."""
    return cache.shape[-1] - SCALE_BYTES.get(cache.dtype, 0)


def quantize_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts x [..., head_dim], of any floating dtype, to rows [..., row_width] of a cache of `dtype`."""
    if dtype == torch.float8_e4m3fn:
        return x.float().clamp(-E4M3_MAX, E4M3_MAX).to(dtype)
    if dtype != torch.int8:
        return x.to(dtype)
    exact = x.float()
    most = exact.abs().amax(-1, keepdim=True)  # NaN if the row has one
    finite = most.isfinite()
    largest = torch.full_like(most, 127)  # torch computes 127 / most as 127 * (1 / most)
    inverse = torch.where((most >= LEAST_MAGNITUDE) & finite, largest / most, 0.0)
    integers = torch.round(torch.where(finite, exact, 0.0) * inverse).to(torch.int8)
    scales = torch.where(finite, most / 127, torch.nan)
    as_bytes = scales.flatten().view(torch.int8).view(*x.shape[:-1], SCALE_BYTES[dtype])
    return torch.cat((integers, as_bytes), dim=-1)


def dequantize_rows(rows: Tensor) -> Tensor:
    """Converts rows [..., row_width] of a cache to the numbers that they represent, fp32 [..., head_dim]."""
    if rows.dtype != torch.int8:
        return rows.float()
    integers, scales = rows.split((head_dim_of(rows), SCALE_BYTES[torch.int8]), dim=-1)
    return integers.float() * scales.contiguous().view(torch.float32)
