"""Determines the sizes of a model that transformers defines, and checks that our blocks can store its state.

transformers' own configuration classes read `config.json`, with their defaults and names. The model is built only if it
has recurrent layers, and then without memory for its weights, in order to determine the sizes of its states.
"""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from engine.errors import ModelError, UnsupportedModel
from engine.foreign import state_hook
from engine.foreign.attention_hook import StateFacts
from engine.kv_groups import LayerMemory
from engine.rope_config import stretched

ATTENDING = ("full_attention", "sliding_attention", "hybrid")
"""Kinds of layers that store keys and values by position."""
RECURRENT = ("linear_attention", "conv", "hybrid")
"""Kinds of layers that have a recurrent state."""
OTHERS = ("mlp", "moe")
"""Kinds of layers that store nothing."""
UNLIMITED = 32_768
"""The maximum number of positions of a model whose configuration has no limit, because its states have no limit."""
OLDEST = "5.21.1"
"""Oldest supported version of transformers. Before 5.15, recurrent layers do not call functions that `state_hook` can
replace. Before 5.21, rotary modules do not accept frequencies by position (`steady_rope`).
"""
STABLE_ROPE = ("default", "linear", "llama3", "yarn", "proportional", "longrope", "dynamic")
"""Kinds of rotary positions that rotate a position the same way in every step, some of them only with `steady_rope`."""


def read(directory: Path) -> Any:
    """Returns transformers' configuration of a decoder-only language model. Raises ModelError if transformers is
    missing or too old, and UnsupportedModel if the model is of another kind or has a feature that is not supported.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ModelError(
            "this architecture needs transformers, which is not installed: pip install 'looseleaf[transformers]'"
        )
    import transformers
    from packaging.version import Version  # which transformers needs too

    if Version(found := metadata.version("transformers")) < Version(OLDEST):
        raise ModelError(f"transformers {found} is too old; {OLDEST} is needed: pip install 'looseleaf[transformers]'")
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers does not document its errors
        raise UnsupportedModel(f"transformers cannot read {directory / 'config.json'}: {_first_line(error)}") from error
    name = (config.architectures or [f"model_type {config.model_type}"])[0]
    known = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in known or (config.architectures and name != known[type(config)].__name__):
        raise UnsupportedModel(f"architecture {name} is not a decoder-only language model of transformers")
    _refuse(config, name)
    return config


def text_of(config: Any) -> Any:
    """Returns the part of a configuration that describes the language model."""
    return config.get_text_config(decoder=True)


def head_sizes(config: Any) -> tuple[int, int, int]:
    """Returns the number of query heads, the number of KV heads, and the width of a cached key or value, whichever is
    wider. Returns (1, 1, 8) if no layer has attention. Raises UnsupportedModel if the number of heads is unknown.
    """
    text = text_of(config)
    if not any(layer.attends for layer in layer_memories(config)):
        return 1, 1, 8
    if not getattr(text, "num_attention_heads", None):
        raise UnsupportedModel(
            f"model_type {text.model_type} has neither attention heads nor a known kind of recurrent state"
        )
    heads = int(text.num_attention_heads)
    if getattr(text, "kv_lora_rank", None):  # multi-head latent attention is cached as expanded heads
        return heads, heads, max(int(text.qk_nope_head_dim) + int(text.qk_rope_head_dim), int(text.v_head_dim))
    width = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    return heads, int(getattr(text, "num_key_value_heads", None) or heads), width


def longest(config: Any) -> int:
    """Returns the maximum number of positions of the model, including the extension by RoPE scaling. Raises ModelError
    if the model has attention and its configuration has no maximum.
    """
    text = text_of(config)
    length = getattr(text, "max_position_embeddings", None)
    if not length and not any(layer.attends for layer in layer_memories(config)):
        return UNLIMITED
    if not length:
        raise ModelError("config.json has no max_position_embeddings")
    ropes = _ropes(text)
    if len(ropes) > 1:  # if layers differ, max_position_embeddings includes all scaling except dynamic NTK
        ropes = [rope for rope in ropes if rope.get("rope_type") == "dynamic"]
    return max([int(length), *(_stretched(rope, int(length)) for rope in ropes)])


def _stretched(rope: dict[str, Any], length: int) -> int:
    original = int(rope.get("original_max_position_embeddings") or length)
    return stretched(str(rope.get("rope_type")), length, original, float(rope.get("factor") or 1.0))


def _ropes(text: Any) -> list[dict[str, Any]]:
    """Returns the parameters of the rotary positions, with one entry for all layers or one for each type of layer."""
    rope = getattr(text, "rope_parameters", None) or {}
    return [value for value in rope.values() if isinstance(value, dict)] or [rope]


def layer_memories(config: Any) -> tuple[LayerMemory, ...]:
    """Returns the memory of each layer for a sequence, according to the configuration. Raises UnsupportedModel if a
    recurrent state is not supported.
    """
    text = text_of(config)
    num_layers, window = int(text.num_hidden_layers), getattr(text, "sliding_window", None) or None
    default = "sliding_attention" if window and getattr(text, "use_sliding_window", True) else "full_attention"
    kinds = getattr(text, "layer_types", None) or [default] * num_layers
    states = _states(config) if set(kinds) & set(RECURRENT) else {}
    for layer, kind in enumerate(kinds):
        facts = states.get(layer, StateFacts())
        if kind in RECURRENT and not (facts.convolution if kind == "conv" else facts.recurrence):
            raise UnsupportedModel(f"layer {layer} ({kind}) has a recurrent state of a kind that is not supported")
    return tuple(
        LayerMemory(
            kind in ATTENDING,
            int(window) if window and kind == "sliding_attention" else None,
            states[layer].num_bytes if kind in RECURRENT else 0,
        )
        for layer, kind in enumerate(kinds)
    )


def _states(config: Any) -> dict[int, StateFacts]:
    """Returns the size of each recurrent layer's state."""
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return {layer: state_hook.facts_of(mixer) for layer, mixer in state_hook.mixers_of(model).items()}


def rope_kinds(config: Any) -> set[str]:
    """Returns the kinds of rotary positions that the layers use. The set is empty if they use none."""
    return {str(rope["rope_type"]) for rope in _ropes(text_of(config)) if rope.get("rope_type")}


def _refuse(config: Any, name: str) -> None:
    text = text_of(config)
    if config.is_encoder_decoder:
        raise UnsupportedModel("is_encoder_decoder is not supported; use a decoder-only model")
    if quantization := getattr(config, "quantization_config", None):
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise UnsupportedModel(f"quantization_config ({method}) needs a native implementation, but {name} has none")
    kinds = set(getattr(text, "layer_types", None) or ())
    if other := sorted(kinds - {*ATTENDING, *RECURRENT, *OTHERS}):
        raise UnsupportedModel(f"architecture {name} has layers of kind {', '.join(other)}, which is not supported")
    if text.model_type in ("bloom", "mpt") or getattr(text, "alibi", False):
        raise UnsupportedModel(f"architecture {name} adds ALiBi to attention scores, which is not supported")
    if unsteady := sorted(rope_kinds(config) - set(STABLE_ROPE)):
        raise UnsupportedModel(f"RoPE scaling {', '.join(unsteady)} is not supported by the transformers backend")


def _first_line(error: Exception) -> str:
    return (str(error) or repr(error)).splitlines()[0]
