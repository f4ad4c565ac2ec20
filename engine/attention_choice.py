"""Determines the attention specs of a model's layers, and chooses a provider for each layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from common.types import DType, KvOrder
from engine.binding import TORCH_DTYPES
from engine.config import ModelConfig
from engine.foreign.model import TransformersModel
from engine.kv_groups import LayerGroup
from engine.models.decoder import Decoder
from engine.models.opt import Opt
from kernels.kv_cache import has_words
from kernels.providers.base import AttentionProvider, AttentionSpec
from kernels.providers.own import CpuAttention

Model = Opt | Decoder | TransformersModel


def spec_by_layer(base: AttentionSpec, model: Model, config: ModelConfig) -> dict[int, AttentionSpec]:
    """Returns the spec of each attention layer. The result is empty for a native model whose layers all use `base`."""
    if isinstance(model, TransformersModel):
        return {
            index: replace(
                base, softmax_scale=layer.scale, window=layer.window, softcap=layer.softcap, sinks=layer.sinks
            )
            for index, layer in model.layers.items()
        }
    return {index: replace(base, window=layer.window) for index, layer in enumerate(config.memories)}


def kv_order(provider: AttentionProvider, dtype: DType, block_size: int) -> KvOrder:
    """Returns the order of the numbers in a block that is fastest for the provider."""
    takes_words = isinstance(provider, CpuAttention) and has_words(TORCH_DTYPES[dtype], block_size)
    return "words_first" if takes_words else "heads_first"


def choose_by_layer(
    specs: Mapping[int, AttentionSpec],
    groups: Sequence[LayerGroup],
    choose: Callable[[AttentionSpec], AttentionProvider],
) -> dict[int, tuple[AttentionProvider, int]]:
    """Returns a provider and the number of a KV group for each layer in `specs`. Layers with the same group and the
    same attention share a provider.
    """
    found: dict[object, AttentionProvider] = {}
    providers = {}
    group_of = {layer: n for n, group in enumerate(groups) if not group.has_states for layer in group.layers}
    for index, spec in specs.items():
        sinks = None if spec.sinks is None else id(spec.sinks)
        key = (group_of[index], spec.softmax_scale, spec.window, spec.softcap, sinks)
        if key not in found:
            found[key] = choose(spec)
        providers[index] = (found[key], group_of[index])
    return providers
