"""Readers of `config.json`, one for each native family or group of similar families. Most optional keys have the same
defaults as in transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.config import ExpertsConfig, Family, ModelConfig, read_dtype
from engine.errors import UnsupportedModel, refuse_unless
from engine.kv_groups import LayerMemory
from engine.rope_config import read_rope

FULL, SLIDING = "full_attention", "sliding_attention"
"""transformers' names for layers that attend to all keys, and for layers with a window."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """A family's defaults for optional keys of `config.json`."""

    length: int = 32_768
    kv_heads: int | None = None
    """Number of KV heads; None means as many as query heads."""
    head_dim: int | None = None
    """Size of a head; None means hidden_size / query heads."""
    theta: float = 10_000.0
    eps: float = 1e-6
    tied: bool = False
    window: int | None = None


GEMMA = Defaults(131_072, kv_heads=4, head_dim=256, tied=True, window=4096)
DEFAULTS: dict[Family, Defaults] = {
    "llama": Defaults(2048),
    "mistral": Defaults(131_072, kv_heads=8, window=4096),
    "qwen2": Defaults(kv_heads=32, window=4096),
    "qwen3": Defaults(kv_heads=32, head_dim=128, window=4096),
    "gemma2": replace(GEMMA, length=8192),
    "gemma3_text": GEMMA,
    "phi3": Defaults(4096, eps=1e-5),
    "qwen3_moe": Defaults(kv_heads=4, window=4096),
    "mixtral": Defaults(131_072, kv_heads=8, theta=1e6, eps=1e-5),
}


def read(raw: dict[str, Any], family: Family) -> ModelConfig:
    """Reads a native family's configuration.

    Raises KeyError, TypeError or ValueError for a missing or invalid field, and UnsupportedModel for a setting that is
    not supported.
    """
    readers: dict[Family, Callable[[dict[str, Any]], ModelConfig]] = {
        "opt": _opt,
        "gemma2": _gemma2,
        "gemma3_text": _gemma3,
        "phi3": _phi3,
        "qwen3_moe": _qwen3_moe,
        "mixtral": _mixtral,
    }
    config = readers[family](raw) if family in readers else _llama_like(raw, family)
    _check_sizes(config)
    return config


def _decoder(raw: dict[str, Any], family: Family) -> ModelConfig:
    """Reads the fields that all families except OPT share, except those for rotary positions."""
    default, heads, hidden = DEFAULTS[family], int(raw["num_attention_heads"]), int(raw["hidden_size"])
    return ModelConfig(
        family=family,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or default.kv_heads or heads),
        head_dim=int(raw.get("head_dim") or default.head_dim or hidden // heads),
        max_model_len=int(raw.get("max_position_embeddings") or default.length),
        norm_eps=float(raw.get("rms_norm_eps", default.eps)),
        tie_embeddings=bool(raw.get("tie_word_embeddings", default.tied)),
        embed_dim=hidden,
        checkpoint_dtype=read_dtype(raw),
    )


def _llama_like(raw: dict[str, Any], family: Family) -> ModelConfig:
    refuse_unless(raw, "hidden_act", "silu", "swish")
    config = _decoder(raw, family)
    attention_bias = bool(raw.get("attention_bias", False)) and family in ("llama", "qwen3", "qwen3_moe")
    rope, length = read_rope(raw, config.max_model_len, DEFAULTS[family].theta)
    return replace(
        config,
        max_model_len=length,
        rope=rope,
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=attention_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)) and family == "llama",
        qk_norm=family in ("qwen3", "qwen3_moe"),
        **_windows(_kinds(raw, family, config.num_layers), raw.get("sliding_window", DEFAULTS[family].window)),
    )


def _gemma2(raw: dict[str, Any]) -> ModelConfig:
    config = _gemma(raw, "gemma2", pattern=2)
    rope, _ = read_rope(raw, config.max_model_len)
    return replace(
        config,
        rope=rope,
        softcap=_optional(raw.get("attn_logit_softcapping", 50.0)),
        logits_softcap=_optional(raw.get("final_logit_softcapping", 30.0)),
    )


def _gemma3(raw: dict[str, Any]) -> ModelConfig:
    """Reads the configuration of Gemma 3, whose layers with a window have separate rotary settings.
    `max_position_embeddings` is the length after scaling.
    """
    config = _gemma(raw, "gemma3_text", pattern=int(raw.get("sliding_window_pattern", 6)))
    by_kind = raw.get("rope_parameters") or {}
    everywhere = {"rope_theta": raw.get("rope_theta", 1e6), "rope_scaling": raw.get("rope_scaling")}
    local = {"rope_theta": raw.get("rope_local_base_freq", 1e4)}
    rope, _ = read_rope(everywhere | {"rope_parameters": by_kind.get(FULL)}, config.max_model_len)
    window_rope, _ = read_rope(local | {"rope_parameters": by_kind.get(SLIDING)}, config.max_model_len)
    capped = _optional(raw.get("final_logit_softcapping"))
    return replace(config, rope=rope, window_rope=window_rope, qk_norm=True, logits_softcap=capped)


def _gemma(raw: dict[str, Any], family: Family, pattern: int) -> ModelConfig:
    """Reads the fields that Gemma 2 and 3 share. Without `layer_types`, every `pattern`-th layer has full attention."""
    refuse_unless(raw, "hidden_activation", "gelu_pytorch_tanh")
    refuse_unless(raw, "use_bidirectional_attention", None, False)
    config = _decoder(raw, family)
    bias = bool(raw.get("attention_bias", False))
    kinds = raw.get("layer_types") or [SLIDING if (i + 1) % pattern else FULL for i in range(config.num_layers)]
    return replace(
        config,
        activation="gelu_tanh",
        norm_offset=True,
        sandwich_norms=True,
        embed_scale=config.hidden_size**0.5,
        softmax_scale=float(raw.get("query_pre_attn_scalar", 256)) ** -0.5,
        qkv_bias=bias,
        o_bias=bias,
        **_windows(kinds, raw.get("sliding_window", DEFAULTS[family].window)),
    )


def _phi3(raw: dict[str, Any]) -> ModelConfig:
    refuse_unless(raw, "hidden_act", "silu", "swish")
    config = _decoder(raw, "phi3")
    rope, length = read_rope(raw, config.max_model_len, kinds=("default", "longrope"), partial=True)
    kinds = [SLIDING if raw.get("sliding_window") else FULL]
    return replace(
        config,
        max_model_len=length,
        rope=rope,
        fused_projections=True,
        **_windows(kinds * config.num_layers, raw.get("sliding_window")),
    )


def _qwen3_moe(raw: dict[str, Any]) -> ModelConfig:
    config = _llama_like(raw, "qwen3_moe")
    step, dense = int(raw.get("decoder_sparse_step", 1)), raw.get("mlp_only_layers") or []
    experts = ExpertsConfig(
        count=int(raw.get("num_experts") or raw.get("num_local_experts") or 128),
        per_token=int(raw.get("num_experts_per_tok", 8)),
        intermediate_size=int(raw.get("moe_intermediate_size", 768)),
        renormalize=bool(raw.get("norm_topk_prob", False)),
        round_weights=True,
        names=("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj"),
        dense_layers=tuple(i for i in range(config.num_layers) if i in dense or (i + 1) % step),
    )
    return replace(config, experts=experts)


def _mixtral(raw: dict[str, Any]) -> ModelConfig:
    config = _llama_like(raw, "mixtral")
    experts = ExpertsConfig(
        count=int(raw.get("num_local_experts") or raw.get("num_experts") or 8),
        per_token=int(raw.get("num_experts_per_tok", 2)),
        intermediate_size=config.intermediate_size,
        renormalize=True,
        round_weights=False,
        names=("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"),
    )
    return replace(config, experts=experts)


def _opt(raw: dict[str, Any]) -> ModelConfig:
    refuse_unless(raw, "activation_function", "relu")
    refuse_unless(raw, "layer_norm_elementwise_affine", True)
    hidden, heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
    bias = bool(raw.get("enable_bias", True))
    norm_before = bool(raw.get("do_layer_norm_before", True))
    return ModelConfig(
        family="opt",
        vocab_size=int(raw["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(raw["ffn_dim"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_model_len=int(raw.get("max_position_embeddings", 2048)),
        norm_eps=1e-5,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        tie_embeddings=bool(raw.get("tie_word_embeddings", True)),
        embed_dim=int(raw.get("word_embed_proj_dim") or hidden),
        norm_before=norm_before,
        final_norm=norm_before and not raw.get("_remove_final_layer_norm", False),
        checkpoint_dtype=read_dtype(raw),
    )


def _kinds(raw: dict[str, Any], family: Family, num_layers: int) -> Sequence[str]:
    """Returns the kind of attention of each layer of a Llama-like family."""
    windowed = bool(raw.get("sliding_window", DEFAULTS[family].window)) and family != "llama"
    if family in ("mistral", "mixtral"):
        return [SLIDING if windowed else FULL] * num_layers
    if not (windowed and raw.get("use_sliding_window", False)):
        return [FULL] * num_layers
    if family == "qwen3_moe":
        return [SLIDING] * num_layers
    first = int(raw.get("max_window_layers", 28))
    return raw.get("layer_types") or [FULL if i < first else SLIDING for i in range(num_layers)]


def _windows(kinds: Sequence[str], window: Any) -> dict[str, Any]:
    """Returns the configuration's fields for windows, with one window for all layers or one for each layer."""
    if other := sorted(set(kinds) - {FULL, SLIDING}):
        raise UnsupportedModel(f"layers of kind {', '.join(other)} are not supported; only {FULL} and {SLIDING} are")
    windows = [int(window) if kind == SLIDING else None for kind in kinds]
    if len(set(windows)) == 1:
        return {"window": windows[0]}
    return {"memories": tuple(LayerMemory(window=each) for each in windows)}


def _optional(value: Any) -> float | None:
    return float(value) if value else None


def _check_sizes(config: ModelConfig) -> None:
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    for name in (*sizes, "max_model_len", "embed_dim"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} is {getattr(config, name)}")
    if config.num_heads % config.num_kv_heads:
        raise ValueError(f"{config.num_heads} heads cannot share {config.num_kv_heads} KV heads")
    if config.memories and len(config.memories) != config.num_layers:
        raise ValueError(f"layer_types names {len(config.memories)} layers of {config.num_layers}")
    if config.experts is not None and not 1 <= config.experts.per_token <= config.experts.count:
        raise ValueError(f"a token cannot have {config.experts.per_token} of {config.experts.count} experts")
    if config.family == "opt" and config.hidden_size % config.num_heads:
        raise ValueError(f"hidden_size {config.hidden_size} is not a multiple of {config.num_heads} heads")
    if config.head_dim % 8:
        raise UnsupportedModel(f"head_dim {config.head_dim} is not supported; it must be a multiple of 8")
