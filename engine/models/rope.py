"""Computes a model's tables of rotary positions, which are in fp32. The formulas are those of transformers'
`modeling_rope_utils`.

A row of a table depends only on its position, so cached KV does not depend on how a prompt was divided into chunks.
"""

from __future__ import annotations

import math

import torch

from engine.rope_config import RopeConfig


def cos_sin_table(rope: RopeConfig, head_dim: int, max_len: int) -> torch.Tensor:
    """Returns the rotations of positions 0..max_len-1 as fp32 [max_len, D], with D/2 cosines followed by D/2 sines. D
    is the number of rotated dimensions. Cosines and sines are multiplied by `attention_factor`.
    """
    positions, width = torch.arange(max_len, dtype=torch.float32), rope.rotated(head_dim)
    if rope.kind == "dynamic":
        angles = positions[:, None] * _dynamic(rope, width, positions)  # [max_len, D/2]
    else:
        angles = positions[:, None] * inverse_frequencies(rope, width, max_len)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor(rope)


def inverse_frequencies(rope: RopeConfig, width: int, max_len: int) -> torch.Tensor:
    """Returns the radians per position of each pair of `width` dimensions, fp32 [width/2]. `max_len` is the length of
    the longest sequence that will be served. Does not support dynamic scaling, whose frequencies depend on the
    position.
    """
    plain = _plain(rope.theta, width)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, width)
    if rope.kind == "longrope":
        factors = rope.long_factors if rope.is_long(max_len) else rope.short_factors
        return 1.0 / (torch.tensor(factors) * _wavelengths(rope.theta, width))
    return plain


def attention_factor(rope: RopeConfig) -> float:
    """Returns the factor by which cosine and sine are multiplied. For YaRN (eq. 22 of arXiv 2309.00071) and LongRoPE
    (sec. 3.3 of arXiv 2402.13753), it is the configured factor or, if none is configured, computed from the scaling.
    Otherwise, it is 1.
    """
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind == "longrope":
        return math.sqrt(1 + math.log(max(1.0, rope.factor)) / math.log(rope.original_max_len))
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _plain(theta: float, head_dim: int) -> torch.Tensor:
    return 1.0 / _wavelengths(theta, head_dim)


def _wavelengths(theta: float, head_dim: int) -> torch.Tensor:
    """Returns the number of positions per radian of each pair of dimensions, fp32 [head_dim/2]."""
    exponents: torch.Tensor = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    return exponents


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _dynamic(rope: RopeConfig, head_dim: int, positions: torch.Tensor) -> torch.Tensor:
    """Returns the frequencies of dynamic NTK, [max_len, head_dim/2], whose base grows with the sequence.

    Position p gets the base of a sequence of p + 1 tokens, as in transformers with a cache. If all positions of a pass
    used the base of the last position, KV would depend on how a prompt was divided into chunks.
    """
    length = (positions.double() + 1).clamp(min=rope.original_max_len)
    growth = rope.factor * length / rope.original_max_len - (rope.factor - 1)
    base = rope.theta * growth ** (head_dim / (head_dim - 2))  # [max_len]
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / (base.float()[:, None] ** exponents)


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Returns the frequencies of Llama 3.1. Low frequencies are divided by `factor`, high frequencies are kept, and
    frequencies between them are interpolated.
    """
    wavelen = 2 * math.pi / plain
    smooth = (rope.original_max_len / wavelen - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - smooth) * plain / rope.factor + smooth * plain
    scaled = torch.where(wavelen > rope.original_max_len / rope.low_freq_factor, plain / rope.factor, between)
    return torch.where(wavelen < rope.original_max_len / rope.high_freq_factor, plain, scaled)


def _yarn(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Returns the frequencies of YaRN. Low frequencies are interpolated, and high frequencies are kept, with a linear
    ramp between them.
    """
    frequencies = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)

    def dimension_of(rotations: float) -> float:
        return head_dim * math.log(rope.original_max_len / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, head_dim - 1.0)
    high += 0.001 if low == high else 0.0
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return (1.0 / (rope.factor * frequencies)) * (1 - keep) + (1.0 / frequencies) * keep
