"""Implements transformers' attention interface with our attention over blocks, and records each layer's requirements.

A thread sets the implementation while it runs a model (`answered_by`), because some families do not pass keyword
arguments on to the attention. At startup, a `Recorder` returns zeros and records the requirements of each layer.
`state_hook` directs the calls of recurrent layers to the same implementation.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor

from engine.errors import UnsupportedModel
from engine.models.attention import LayerCache, StepMetadata
from kernels.kv_cache import head_dim_of
from kernels.recurrence import Recurrence, StateBatch, convolution, recurrence
from kernels.write_blocks import write_blocks

NAME = "looseleaf"
HARMLESS = {
    "attention_mask", "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "dropout", "max_length_k", "max_length_q",
    "output_attentions", "output_hidden_states", "output_router_logits", "position_ids", "return_dict", "use_cache",
}  # fmt: skip
"""Arguments that have no effect in a causal pass without transformers' own cache."""


_RUNNING = threading.local()


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """The attention requirements of one layer."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None  # fp32 [num_heads]


@dataclass(slots=True)
class StateFacts:
    """The size of a layer's recurrent state."""

    convolution: int = 0
    """Number of values that the convolution keeps."""
    recurrence: int = 0
    """Number of values that the recurrence keeps; 0 if the layer has only a convolution."""

    @property
    def num_bytes(self) -> int:
        """The size of the state in a block, in bytes, rounded up to whole cache lines."""
        return -(-4 * (self.convolution + self.recurrence) // 64) * 64


class Call(Protocol):
    """The interface of an implementation of a layer's attention and recurrence (`Pass`, `Recorder`)."""

    layer: int
    """Index of the recurrent layer that is running."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, asked: dict[str, Any]) -> Tensor:
        """Maps q [T, H, D], k [T, KVH, D] and v [T, KVH, DV] to the attention [T, H, DV] of a layer. `asked` contains
        the other arguments that the layer passes.
        """
        ...

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
        """Maps x [T, C] to [T, C] (see `kernels.recurrence.convolution`)."""
        ...

    def recur(self, layer: int, inputs: Recurrence) -> Tensor:
        """Returns the outputs fp32 [T, H, P] of the recurrence (see `kernels.recurrence.recurrence`)."""
        ...


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **asked: Any
) -> tuple[Tensor, None]:
    """Maps query [1, H, T, D], key [1, KVH, T, D] and value [1, KVH, T, DV] to [1, T, H, DV]. transformers calls this
    function. Raises UnsupportedModel if the model passes an attention mask.
    """
    if attention_mask is not None:
        raise UnsupportedModel(f"{type(module).__name__} computes its own attention mask")
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    call = running()
    assert call is not None
    return call.attend(int(module.layer_idx), q, k, v, asked)[None], None


def running() -> Call | None:
    """Returns the implementation that this thread has set, or None if the thread is not running one of our models."""
    return getattr(_RUNNING, "call", None)


@contextlib.contextmanager
def answered_by(call: Call) -> Iterator[None]:
    """Makes `call` the implementation for this thread inside a `with` block."""
    _RUNNING.call = call
    try:
        yield
    finally:
        del _RUNNING.call


def no_mask(*args: Any, **kwargs: Any) -> None:
    """Returns None, because our attention is causal without a mask, and the layer passes its window as an argument."""


def register() -> None:
    """Registers "looseleaf" as an attention implementation of transformers. Repeated calls do no harm."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)  # type: ignore[no-untyped-call]
    AttentionMaskInterface.register(NAME, no_mask)  # type: ignore[no-untyped-call]


class Recorder:
    """A `Call` that records the requirements of every layer, and returns zeros."""

    def __init__(self) -> None:
        self.layer = -1
        self.layers: dict[int, LayerFacts] = {}
        self.states: dict[int, StateFacts] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, asked: dict[str, Any]) -> Tensor:
        """Records an attention call (see `Call.attend`). Raises UnsupportedModel if the layer makes several calls, has
        unknown arguments or is not causal.
        """
        if layer in self.layers:
            raise UnsupportedModel(f"layer {layer} computes attention twice")
        scale, window, softcap = (
            asked.pop("scaling", None),
            asked.pop("sliding_window", None),
            asked.pop("softcap", None),
        )
        sinks = asked.pop("s_aux", None)
        causal = asked.pop("is_causal", None)
        unknown = sorted(name for name, value in asked.items() if value is not None and name not in HARMLESS)
        if unknown or causal is False:
            raise UnsupportedModel(f"the attention of layer {layer} has {', '.join(unknown) or 'is_causal=False'}")
        self.layers[layer] = LayerFacts(
            q.shape[1], k.shape[1], k.shape[2], v.shape[2],
            float(scale if scale is not None else q.shape[2] ** -0.5),
            int(window) if window else None,
            float(softcap) if softcap else None,
            None if sinks is None else sinks.detach().float().contiguous(),
        )  # fmt: skip
        return q.new_zeros((*q.shape[:2], v.shape[2]))

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
        """Records a convolution (see `Call.convolve`). Raises UnsupportedModel if the layer has several."""
        facts = self._state_of(layer)
        if facts.convolution:
            raise UnsupportedModel(f"layer {layer} has several convolutions")
        facts.convolution = (weight.shape[1] - 1) * weight.shape[0]
        return x.new_zeros(x.shape)

    def recur(self, layer: int, inputs: Recurrence) -> Tensor:
        """Records a recurrence (see `Call.recur`). Raises UnsupportedModel if the layer has several."""
        facts = self._state_of(layer)
        if facts.recurrence:
            raise UnsupportedModel(f"layer {layer} has several recurrences")
        facts.recurrence = inputs.state_size
        return inputs.values.new_zeros(inputs.values.shape)

    def _state_of(self, layer: int) -> StateFacts:
        return self.states.setdefault(layer, StateFacts())


@dataclass(slots=True)
class Pass:
    """A `Call` for one step. It writes K and V to blocks, attends to the K and V in blocks, and updates the states in
    blocks.
    """

    step: StepMetadata
    caches: Mapping[int, LayerCache]
    facts: Mapping[int, StateFacts]
    """Sizes of the states of each layer that has states."""
    layer: int = -1

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, asked: dict[str, Any]) -> Tensor:
        """Computes the attention of one layer (see `Call.attend`)."""
        step, cache = self.step, self.caches[layer]
        wide, value_dim = head_dim_of(cache.values), v.shape[2]
        q, k, v = _padded(q, wide), _padded(k, wide), _padded(v, wide)
        provider, group = step.by_layer[layer]
        write_blocks(q, k, v, step.positions, group.slot_mapping, cache.keys, cache.values, None)
        run = provider.decode if group.batch.decode_only else provider.prefill
        return run(q, cache.keys, cache.values, group.batch)[..., :value_dim]

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
        """Computes a convolution (see `Call.convolve`)."""
        states, batch = self._states_of(layer)
        return convolution(x, weight, bias, silu, states[:, : self.facts[layer].convolution], batch)

    def recur(self, layer: int, inputs: Recurrence) -> Tensor:
        """Computes a recurrence (see `Call.recur`)."""
        states, batch = self._states_of(layer)
        first, facts = self.facts[layer].convolution, self.facts[layer]
        return recurrence(inputs, states[:, first : first + facts.recurrence], batch)

    def _states_of(self, layer: int) -> tuple[Tensor, StateBatch]:
        states, group = self.step.states[layer]
        batch = group.batch
        return states, StateBatch(batch.block_table, batch.context_lens, batch.cu_seqlens_q, self.step.block_size)


def _padded(x: Tensor, width: int) -> Tensor:
    """Returns `x` with its last dimension padded to `width` with zeros, which do not affect scores or sums. The last
    dimension of the result is contiguous.
    """
    if x.shape[2] < width:
        return F.pad(x, (0, width - x.shape[2]))
    return x if x.stride(2) == 1 else x.contiguous()
