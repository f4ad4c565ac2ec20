"""The configuration of a model, read from the `config.json` of a Hugging Face directory."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from common.types import DType, KvLayout, KvSpec
from engine.errors import ModelError, UnsupportedModel
from engine.kv_groups import LayerGroup, LayerMemory, default_block_size, layout_of
from engine.rope_config import RopeConfig

if TYPE_CHECKING:
    from engine.quantized import WeightFormat

logger = logging.getLogger("engine")
Family = Literal["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "qwen3_moe", "mixtral", "opt"]
"""Families with a native implementation, by their `model_type`."""
Activation = Literal["silu", "gelu_tanh"]
"""The activation of the gate in an MLP."""
ModelImpl = Literal["auto", "native", "transformers"]
"""The model definition to use. auto: the native definition if it supports the checkpoint, otherwise that of
transformers.
"""
LONG_CONTEXT, LONG_BLOCK = 4096, 64
"""On a CPU, if a sequence may have LONG_CONTEXT tokens, the default block size is at least LONG_BLOCK tokens."""

ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Phi3ForCausalLM": "phi3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral",
    "OPTForCausalLM": "opt",
}


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The configuration of a mixture of experts. A router chooses a few of the experts (MLPs) for each token."""

    count: int
    per_token: int
    intermediate_size: int
    renormalize: bool
    """Whether the weights of a token's experts are scaled to a sum of 1."""
    round_weights: bool
    """Whether the weights of a token's experts are rounded to the model's dtype, which transformers does for some
    families.
    """
    names: tuple[str, str, str, str, str]
    """Names in a layer of the checkpoint: the router, the list of experts, and an expert's gate, up and down
    projections.
    """
    dense_layers: tuple[int, ...] = ()
    """Layers that have a single MLP of the model's `intermediate_size` instead of experts."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The configuration of one model. Lengths are in tokens, sizes in elements."""

    family: Family | Literal["transformers"]
    """The family of the model; "transformers" if the transformers library defines the model (`engine.foreign`)."""
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
    """The configuration of rotary positions; None if positions are learned."""
    window_rope: RopeConfig | None = None
    """Rotary positions of layers with a window, if they differ from `rope`."""
    window: int | None = None
    """Sliding window: a query at position p sees keys p - window + 1 .. p. None: all keys up to p."""
    memories: tuple[LayerMemory, ...] = ()
    """The memory of each layer for a sequence. Empty if every layer has attention with the same `window`."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_offset: bool = False
    """Whether RMS norms multiply by 1 + weight, in fp32 (Gemma)."""
    sandwich_norms: bool = False
    """Whether the outputs of attention and MLP are also normalized before they are added (Gemma)."""
    activation: Activation = "silu"
    embed_scale: float = 1.0
    """Factor by which word embeddings are multiplied."""
    softmax_scale: float | None = None
    """Factor by which attention scores are multiplied; None means head_dim ** -0.5."""
    softcap: float | None = None
    """If given, attention scores become softcap * tanh(score / softcap)."""
    logits_softcap: float | None = None
    """If given, logits become softcap * tanh(logit / softcap)."""
    fused_projections: bool = False
    """Whether the checkpoint stores the projections of q, k and v as one tensor, and those of gate and up as another
    (Phi-3).
    """
    experts: ExpertsConfig | None = None
    tie_embeddings: bool = False
    embed_dim: int = 0
    """Width of the word embeddings, which OPT may project to `hidden_size`."""
    norm_before: bool = True
    """Whether LayerNorm comes before each sublayer (True) or after it (OPT-350m)."""
    final_norm: bool = True
    checkpoint_dtype: DType = "float32"
    weight_format: WeightFormat | None = None
    """The storage format of quantized weights; None if weights are not quantized."""
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_directory(cls, path: str | Path, impl: ModelImpl = "auto") -> ModelConfig:
        """Reads `config.json` (and end-of-sequence ids from `generation_config.json`). `impl` chooses the model
        definition; see `ModelImpl`.

        Raises ModelError for a missing directory or file, invalid JSON or an invalid field. Raises UnsupportedModel,
        which names the feature, if the model definition does not support the model.
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
            logger.warning("the transformers library defines the model: %s", objection)
            return config

    @classmethod
    def _native(cls, directory: Path, raw: dict[str, Any]) -> ModelConfig:
        """Returns the configuration for our own implementation of the model. Raises ModelError if a field is missing or
        invalid, and UnsupportedModel if a feature is not supported.
        """
        from engine import families  # needs this module

        family = _native_family(raw)
        if raw.get("is_encoder_decoder"):
            raise UnsupportedModel("is_encoder_decoder is not supported; use a decoder-only model")
        try:
            config = families.read(raw, family)
        except (KeyError, TypeError, ValueError) as error:
            what = f"lacks {error}" if isinstance(error, KeyError) else f"has a bad value ({error})"
            raise ModelError(f"{directory / 'config.json'} {what}") from error
        return _with_eos(replace(config, weight_format=_weight_format(raw)), raw, directory)

    def longest(self, asked: int | None) -> int:
        """Returns the maximum sequence length in tokens, which is `asked`, or the model's number of positions if
        `asked` is None. Raises ModelError if `asked` exceeds the model's number of positions.
        """
        if asked is not None and asked > self.max_model_len:
            raise ModelError(f"max_model_len {asked} is more than the model's {self.max_model_len} positions")
        return asked or self.max_model_len

    def kv_groups(self, block_size: int, dtype: DType) -> tuple[KvLayout, tuple[LayerGroup, ...]]:
        """Returns the layout of a block in each KV group, and the layers of each group."""
        return layout_of(self.layers, self.num_kv_heads, self.head_dim, dtype, block_size)

    def default_block_size(self, dtype: DType, longest: int, on_cpu: bool) -> int:
        """Returns the block size, in tokens, that is used unless the user chooses one. `longest` is the number of
        tokens of the longest sequence. CPUs read long runs of memory faster, so a block is larger there, unless all
        sequences are short.
        """
        least = LONG_BLOCK if on_cpu and longest >= LONG_CONTEXT else 16
        bytes_per_token = KvSpec(1, self.num_kv_heads, self.head_dim, dtype).bytes_per_token
        return default_block_size(self.layers, bytes_per_token, least)

    @property
    def scale_of_scores(self) -> float:
        """The factor by which attention scores are multiplied."""
        return self.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def layers(self) -> tuple[LayerMemory, ...]:
        """The memory of each layer for a sequence."""
        return self.memories or (LayerMemory(window=self.window),) * self.num_layers


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file. Raises ModelError if the file is missing or contains anything else."""
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
    """Returns the native family named by `architectures`, or by `model_type` if `architectures` is absent. Returns None
    if no native family matches.
    """
    by_type = {family: family for family in ARCHITECTURES.values()}
    name = _architecture(raw)
    return ARCHITECTURES.get(name) if raw.get("architectures") else by_type.get(cast(Family, name))


def _native_family(raw: dict[str, Any]) -> Family:
    if (family := _family(raw)) is None:
        raise UnsupportedModel(
            f"architecture {_architecture(raw)} has no native implementation; the native architectures are "
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
        checkpoint_dtype=read_dtype({"dtype": text.dtype}),
    )


def _weight_format(raw: dict[str, Any]) -> WeightFormat | None:
    if not (raw.get("quantization_config") or raw.get("compression_config")):
        return None
    from engine.quantized import read_format  # needs torch

    return read_format(raw)


def read_dtype(raw: dict[str, Any]) -> DType:
    """Returns the dtype of a checkpoint's floats. Raises UnsupportedModel if it is not bfloat16, float16 or float32."""
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in ("bfloat16", "float32", "float16"):
        raise UnsupportedModel(f"checkpoint dtype {name} is not supported; only bfloat16, float16 and float32 are")
    return cast(DType, name)


def _with_eos(config: ModelConfig, raw: dict[str, Any], directory: Path) -> ModelConfig:
    path = directory / "generation_config.json"
    ids = read_json(path).get("eos_token_id") if path.exists() else None
    ids = raw.get("eos_token_id") if ids is None else ids
    as_list = ids if isinstance(ids, list) else [] if ids is None else [ids]
    return replace(config, eos_token_ids=tuple(int(i) for i in as_list))
