"""How many blocks a sequence group can come to need. Arithmetic that gateway and workers must agree on."""

from __future__ import annotations


def blocks_of(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` positions."""
    return -(-num_tokens // block_size)


def group_blocks(prompt_len: int, max_tokens: int, width: int, block_size: int) -> int:
    """The most blocks that a group of `width` samples or beams holds at once, in one KV group.

    The prompt's full blocks are shared; each sequence has the rest to itself, and once, while it is copied to be
    written on, its sealed partial block beside the copy (a group that came back has one for each sequence).
    """
    shared = prompt_len // block_size
    return shared + width * (blocks_of(prompt_len + max_tokens, block_size) - shared + 1)
