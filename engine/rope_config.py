"""The rotary positions that a `config.json` describes. Does not depend on tensors; `engine.models.rope` has the
formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

from engine.errors import UnsupportedModel, refuse_unless

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions. The fields beyond `theta` belong to the scaling named by `kind` (as in transformers)."""

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


def read_rope(raw: dict[str, Any], length: int) -> tuple[RopeConfig, int]:
    """Returns the rotary settings from the old keys (`rope_theta`, `rope_scaling`) or the new ones (`rope_parameters`),
    and the longest sequence. As in vLLM, linear, dynamic and yarn stretch `max_position_embeddings` (yarn: the original
    length).
    """
    scaling = dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind not in ("default", "linear", "dynamic", "yarn", "llama3"):
        raise UnsupportedModel(
            f"RoPE scaling {kind} is not supported; supported are default, linear, dynamic, yarn, llama3"
        )
    for source in (raw, scaling):
        refuse_unless(source, "partial_rotary_factor", 1.0, 1, None)
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    if kind == "default":
        return RopeConfig(theta=theta), length
    original = int(scaling.get("original_max_position_embeddings") or length)
    factor = scaling.get("factor")
    if factor is None and kind == "yarn":
        factor = length / original
    attention_factor = scaling.get("attention_factor")
    rope = RopeConfig(
        theta=theta,
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
    stretch: dict[str, Callable[[], float]] = {
        "linear": lambda: length * rope.factor,
        "dynamic": lambda: length * rope.factor,
        "yarn": lambda: max(length, original * rope.factor),
    }
    return rope, int(stretch[kind]()) if kind in stretch else length
