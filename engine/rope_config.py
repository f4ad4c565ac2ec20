"""The rotary positions that a `config.json` describes. The formulas are in `engine.models.rope`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from engine.errors import UnsupportedModel, refuse_unless

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"]
OTHER_NAMES = {"su": "longrope", "mrope": "default"}
"""Other names of kinds. The first Phi-3 checkpoints call LongRoPE "su". "mrope" (Qwen2-VL) rotates parts of a head by
three positions, which are equal for text.
"""
LLAMA_KINDS: tuple[RopeKind, ...] = ("default", "linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The configuration of rotary positions. The fields other than `theta` and `partial` belong to the scaling named by
    `kind` (as in transformers).
    """

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_len: int = 0
    """Number of positions that the model was trained on before scaling."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    """Divisors of each pair's frequency, for a server whose sequences are limited to `original_max_len`."""
    long_factors: tuple[float, ...] = ()
    """Divisors of each pair's frequency, for a server with longer sequences."""
    partial: float = 1.0
    """Share of a head's dimensions that is rotated."""

    def rotated(self, head_dim: int) -> int:
        """Returns the number of dimensions of a head that are rotated. They are the first dimensions of the head."""
        return int(head_dim * self.partial)

    def is_long(self, max_len: int) -> bool:
        """Returns whether LongRoPE uses `long_factors` in a server whose longest sequence has `max_len` tokens. As in
        vLLM, the choice does not depend on the sequence, so that a key does not depend on later tokens.
        """
        return self.kind == "longrope" and max_len > self.original_max_len


def read_rope(
    raw: dict[str, Any],
    length: int,
    default_theta: float = 10_000.0,
    kinds: Sequence[RopeKind] = LLAMA_KINDS,
    partial: bool = False,
) -> tuple[RopeConfig, int]:
    """Reads the rotary settings from the old keys (`rope_theta`, `rope_scaling`) or the new keys (`rope_parameters`).
    Returns them with the maximum sequence length (`stretched`). Raises UnsupportedModel if the kind is not in `kinds`,
    or if the rotation is partial and `partial` is False.
    """
    scaling = dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    kind = OTHER_NAMES.get(kind, kind)
    if kind not in kinds:
        raise UnsupportedModel(f"RoPE scaling {kind} is not supported; only {', '.join(kinds)} are")
    for source in () if partial else (raw, scaling):
        refuse_unless(source, "partial_rotary_factor", 1.0, 1, None)
    part = float(scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0)
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or default_theta)
    if kind == "default":
        return RopeConfig(theta=theta, partial=part), length
    if kind == "longrope":
        return _longrope(raw, scaling, RopeConfig(theta=theta, kind=kind, partial=part), length), length
    original = int(scaling.get("original_max_position_embeddings") or length)
    factor = scaling.get("factor")
    if factor is None and kind == "yarn":
        factor = length / original
    attention_factor = scaling.get("attention_factor")
    rope = RopeConfig(
        theta=theta,
        partial=part,
        kind=cast(RopeKind, kind),
        factor=float(cast(float, factor)),
        original_max_len=length if kind == "dynamic" else original,
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        attention_factor=None if attention_factor is None else float(attention_factor),
        mscale=float(scaling.get("mscale") or 0.0),
        mscale_all_dim=float(scaling.get("mscale_all_dim") or 0.0),
        truncate=bool(scaling.get("truncate", True)),
    )
    return rope, stretched(kind, length, original, rope.factor)


def stretched(kind: str, length: int, original: int, factor: float) -> int:
    """Returns the maximum sequence length under RoPE scaling of `kind`. `length` is `max_position_embeddings`;
    `original` is the length before scaling. As in vLLM, only linear, dynamic and yarn scaling extend the length.
    """
    if kind in ("linear", "dynamic"):
        return int(length * factor)
    return max(length, int(original * factor)) if kind == "yarn" else length


def _longrope(raw: dict[str, Any], scaling: dict[str, Any], rope: RopeConfig, length: int) -> RopeConfig:
    original = int(raw.get("original_max_position_embeddings") or scaling["original_max_position_embeddings"])
    factor, attention_factor = scaling.get("factor"), scaling.get("attention_factor")
    return replace(
        rope,
        factor=float(factor) if factor is not None else length / original,
        original_max_len=original,
        attention_factor=None if attention_factor is None else float(attention_factor),
        short_factors=tuple(float(each) for each in scaling["short_factor"]),
        long_factors=tuple(float(each) for each in scaling["long_factor"]),
    )
