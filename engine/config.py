"""A model's description, read from the `config.json` of a Hugging Face directory: sizes, positions, norms, biases.

Does not depend on tensors. A setting that would change the numbers is either supported or raises `UnsupportedModel`,
which names it.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from common.types import DTYPE_BYTES, DType, KvLayout
from engine.errors import ModelError, UnsupportedModel, refuse_unless
from engine.kv_groups import LayerGroup, LayerMemory, default_block_size, layout_of
from engine.rope_config import RopeConfig, read_rope

if TYPE_CHECKING:
    from engine.quantized import WeightFormat

logger = logging.getLogger("engine")
Family = Literal["llama", "mistral", "qwen2", "qwen3", "opt"]
ModelImpl = Literal["auto", "native", "transformers"]
"""Whose model definition is run. auto: ours if there is one that supports the checkpoint."""

ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "OPTForCausalLM": "opt",
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model. Lengths in tokens, sizes in elements."""

    family: Family | Literal["transformers"]
    """transformers: the library defines the model (`engine.foreign`)."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    norm_eps: float = 1e-6
    rope: RopeConfig | None = None
    """None if positions are learned."""
    window: int | None = None
    """Sliding window: a query at position p sees keys p - window + 1 .. p. None: all keys up to p."""
    memories: tuple[LayerMemory, ...] = ()
    """What each layer remembers, if they do not all attend to `window`."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    embed_dim: int = 0
    """Width of the word embedding (OPT may project it to `hidden_size`)."""
    norm_before: bool = True
    """LayerNorm before (True) or after each sublayer (OPT-350m)."""
    final_norm: bool = True
    checkpoint_dtype: DType = "float32"
    weight_format: WeightFormat | None = None
    """How quantized weights are stored; None if they are not quantized."""
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_directory(cls, path: str | Path, impl: ModelImpl = "auto") -> ModelConfig:
        """Reads `config.json` (and end-of-sequence ids from `generation_config.json`).

        Raises ModelError for a missing directory or file, invalid JSON or an invalid field. Raises UnsupportedModel,
        which names the unsupported feature.
        """
        directory = Path(path)
        if not directory.is_dir():
            raise ModelError(f"model directory {directory} does not exist")
        raw = read_json(directory / "config.json")
        if impl == "transformers" or (impl == "auto" and _family(raw) is None):
            return _with_eos(_foreign(directory), raw, directory)
        try:
            return cls._native(directory, raw)
        except UnsupportedModel as objection:
            if impl == "native":
                raise
            try:
                config = _with_eos(_foreign(directory), raw, directory)
            except ModelError:
                raise objection from None
            logger.warning("run as transformers defines it: %s", objection)
            return config

    @classmethod
    def _native(cls, directory: Path, raw: dict[str, Any]) -> ModelConfig:
        """Returns the configuration for our own implementation. Raises ModelError and UnsupportedModel."""
        family = _native_family(raw)
        if raw.get("is_encoder_decoder"):
            raise UnsupportedModel("is_encoder_decoder is not supported; use a decoder-only model")
        try:
            config = _opt(raw) if family == "opt" else _llama_like(raw, family)
            _check_sizes(config)
        except (KeyError, TypeError, ValueError) as error:
            what = f"lacks {error}" if isinstance(error, KeyError) else f"has a bad value ({error})"
            raise ModelError(f"{directory / 'config.json'} {what}") from error
        return _with_eos(replace(config, weight_format=_weight_format(raw)), raw, directory)

    def kv_groups(self, block_size: int, dtype: DType) -> tuple[KvLayout, tuple[LayerGroup, ...]]:
        """Returns what a block of each KV group stores, and the layers of each group."""
        return layout_of(self._layers(), self.num_kv_heads, self.head_dim, dtype, block_size)

    def default_block_size(self, dtype: DType) -> int:
        """Returns the block size in tokens if the user has chosen none."""
        return default_block_size(self._layers(), 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[dtype])

    def _layers(self) -> tuple[LayerMemory, ...]:
        return self.memories or (LayerMemory(window=self.window),) * self.num_layers


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file. Raises ModelError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value


# --- families


def _architecture(raw: dict[str, Any]) -> str:
    names = raw.get("architectures") or []
    return str(names[0]) if names else str(raw.get("model_type", "(none)"))


def _family(raw: dict[str, Any]) -> Family | None:
    """Returns the native family by `architectures`, or by `model_type` if that is absent; None if there is none."""
    by_type = {family: family for family in ARCHITECTURES.values()}
    name = _architecture(raw)
    return ARCHITECTURES.get(name) if raw.get("architectures") else by_type.get(cast(Family, name))


def _native_family(raw: dict[str, Any]) -> Family:
    if (family := _family(raw)) is None:
        raise UnsupportedModel(
            f"architecture {_architecture(raw)} has no native implementation; those that have one are "
            f"{', '.join(ARCHITECTURES)}"
        )
    return family


def _foreign(directory: Path) -> ModelConfig:
    from engine.foreign import config as foreign

    found = foreign.read(directory)
    text, (heads, kv_heads, width) = foreign.text_of(found), foreign.head_sizes(found)
    return ModelConfig(
        family="transformers",
        vocab_size=int(text.vocab_size),
        hidden_size=int(text.hidden_size),
        intermediate_size=int(getattr(text, "intermediate_size", None) or 4 * text.hidden_size),
        num_layers=int(text.num_hidden_layers),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=-(-width // 8) * 8,
        max_model_len=foreign.longest(found),
        memories=foreign.layer_memories(found),
        checkpoint_dtype=_dtype({"dtype": text.dtype}),
    )


def _weight_format(raw: dict[str, Any]) -> WeightFormat | None:
    if not (raw.get("quantization_config") or raw.get("compression_config")):
        return None
    from engine.quantized import read_format  # needs torch

    return read_format(raw)


def _llama_like(raw: dict[str, Any], family: Family) -> ModelConfig:
    refuse_unless(raw, "hidden_act", "silu", "swish")
    heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
    # Defaults of absent keys are transformers', which differ by family.
    default_kv_heads = {"mistral": 8, "qwen2": 32, "qwen3": 32}.get(family, heads)
    default_len = {"llama": 2048, "mistral": 131_072}.get(family, 32_768)
    default_head_dim = 128 if family == "qwen3" else hidden // heads
    attention_bias = bool(raw.get("attention_bias", False)) and family in ("llama", "qwen3")
    length = int(raw.get("max_position_embeddings") or default_len)
    rope, max_model_len = read_rope(raw, length)
    return ModelConfig(
        family=family,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or default_kv_heads),
        head_dim=int(raw.get("head_dim") or default_head_dim),
        max_model_len=max_model_len,
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=rope,
        window=_window(raw, family),
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=attention_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)) and family == "llama",
        qk_norm=family == "qwen3",
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        embed_dim=hidden,
        checkpoint_dtype=_dtype(raw),
    )


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
        checkpoint_dtype=_dtype(raw),
    )


def _window(raw: dict[str, Any], family: Family) -> int | None:
    """Returns the one window of all layers. Raises UnsupportedModel for models that mix windowed and full layers."""
    window = raw.get("sliding_window")
    if family == "llama" or not window:
        return None
    if family == "mistral":
        return int(window)
    if not raw.get("use_sliding_window", False):
        return None
    layers = int(raw["num_hidden_layers"])
    first = int(raw.get("max_window_layers", 28))
    kinds = raw.get("layer_types") or ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    if len(set(kinds)) > 1:
        raise UnsupportedModel(
            f"layers that mix full and sliding attention (use_sliding_window with max_window_layers={first}) "
            "are not supported; supported is one kind for all layers"
        )
    return int(window) if kinds[0] == "sliding_attention" else None


# --- small things


def _dtype(raw: dict[str, Any]) -> DType:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in ("bfloat16", "float32", "float16"):
        raise UnsupportedModel(f"checkpoint dtype {name} is not supported; supported are bfloat16, float16, float32")
    return cast(DType, name)


def _check_sizes(config: ModelConfig) -> None:
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    for name in (*sizes, "max_model_len", "embed_dim"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} is {getattr(config, name)}")
    if config.num_heads % config.num_kv_heads:
        raise ValueError(f"{config.num_heads} heads cannot share {config.num_kv_heads} KV heads")
    if config.family == "opt" and config.hidden_size % config.num_heads:
        raise ValueError(f"hidden_size {config.hidden_size} is not a multiple of {config.num_heads} heads")
    if config.head_dim % 8:
        raise UnsupportedModel(f"head_dim {config.head_dim} is not supported; supported are multiples of 8")


def _with_eos(config: ModelConfig, raw: dict[str, Any], directory: Path) -> ModelConfig:
    path = directory / "generation_config.json"
    ids = read_json(path).get("eos_token_id") if path.exists() else None
    ids = raw.get("eos_token_id") if ids is None else ids
    as_list = ids if isinstance(ids, list) else [] if ids is None else [ids]
    return replace(config, eos_token_ids=tuple(int(i) for i in as_list))
