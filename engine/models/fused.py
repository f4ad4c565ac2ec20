"""Runs a decoder's whole pass over one arena in one C call, with the kernels and the bits of `Decoder.forward`.

This saves the time that Python and torch take between the kernels of each layer. Between them, other threads could also
take the interpreter lock.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import is_

import torch

from engine.config import ModelConfig
from engine.kv_groups import LayerGroup
from engine.lora import LoraStep
from engine.models.attention import LayerCache, Projection
from engine.models.decoder import Decoder, DecoderLayer
from engine.models.mlp import Mixture, Mlp
from engine.step import StepInput
from kernels.cpu import amx, linear_int
from kernels.cpu.forward import Group, Layer, Linear, Model, Pass, address, entry, pointer, scratch, scratch_bytes
from kernels.cpu.loader import current
from kernels.cpu.ops import kv_type
from kernels.kv_cache import is_by_word
from kernels.row_parallel import RowParallelLinear
from kernels.sampling import RepeatedSample

_MOST_PREPARED = 64
"""Maximum number of passes that are kept."""


def objection(decoder: Decoder) -> str | None:
    """Returns the reason why a decoder cannot run in one call, or None if it can."""
    if entry(current()) is None:
        return "no C++ kernels are in use"
    dtype = decoder.dtype
    if dtype not in (torch.bfloat16, torch.float32):
        return f"it does not take {dtype}"
    found = {linear.how for linear in _linears(decoder)} - {"amx", "simd", "int4", "int8"}
    return f"linears run on {', '.join(sorted(found))}" if found else None


def _linears(decoder: Decoder) -> list[Projection]:
    layers = [linear for layer in decoder.layers for linear in (layer.qkv, layer.o, *layer.mlp.linears)]
    return layers if decoder.lm_head is None else [*layers, decoder.lm_head]


@dataclass(slots=True)
class _Prepared:
    """A pass, and the arrays of a step to which it points."""

    arrays: tuple[object, ...]
    step: Pass
    groups: ctypes.Array[Group]
    logits: torch.Tensor | None


class FusedDecoder:
    """A decoder, or a stage of one, that runs over the blocks of one arena in one C call. Only one thread at a time may
    use it.
    """

    def __init__(
        self, decoder: Decoder, config: ModelConfig, caches: Mapping[int, LayerCache], groups: Sequence[LayerGroup]
    ) -> None:
        """Prepares the call. `objection` must return None for the decoder."""
        self._library = current()
        run = entry(self._library)
        assert run is not None
        self._run = run
        indices = range(decoder.first_layer, decoder.first_layer + len(decoder.layers))
        own = [caches[index] for index in indices]
        self._kept = (decoder, own)  # keeps the memory behind the addresses alive
        group_of = {layer: number for number, group in enumerate(groups) for layer in group.layers}
        places = [group_of[index] for index in indices]
        self._experts = [_experts(layer) for layer in decoder.layers]
        self._layers = (Layer * len(decoder.layers))(*map(_layer, decoder.layers, own, places, self._experts))
        self._model = _model(decoder, config, own[0], self._layers)
        self._num_groups = len(groups)
        self._prepared: dict[int, _Prepared] = {}
        """The passes of recent steps, by the identity of their tokens."""
        self._scratch = scratch(0)
        self._logits = None if decoder.lm_head is None else torch.empty((0, decoder.lm_head.out_features))
        self._wanted: dict[int, torch.Tensor] = {}
        """The leading rows of `_logits`, by their number. They are the same objects in later runs: to free a tensor
        gives up the interpreter lock.
        """

    def takes(self, batch: StepInput) -> bool:
        """Returns whether the requested rows are ascending rows of the batch, and the kernels have not changed since
        construction. The rows of arrays that a recent run had are not checked again.
        """
        if self._find(batch) is not None:
            return current() is self._library
        wanted = batch.logits_rows
        inside = not len(wanted) or (wanted[0] >= 0 and wanted[-1] < len(batch.token_ids))
        return inside and current() is self._library and bool((wanted[1:] > wanted[:-1]).all())

    def run(
        self,
        batch: StepInput,
        lora: LoraStep | None = None,
        states: torch.Tensor | None = None,
        draw: RepeatedSample | None = None,
    ) -> torch.Tensor:
        """Returns logits fp32 [R, vocab], valid until the next run. `takes` must be True for the batch. Raises
        ValueError if a value is out of range or a rank is lost. `states` [T, h] are the inputs of a stage other than
        the first stage, and may be overwritten. A stage other than the last stage returns the inputs of the next stage.
        `draw` has one entry per requested row, and is run within the pass.
        """
        prepared = self._find(batch) or self._prepare(batch)
        step = prepared.step
        if states is None and self._logits is None:
            states = torch.empty((step.num_tokens, self._model.hidden), dtype=self._kept[0].dtype)
        step.threads = torch.get_num_threads()
        step.lora = None if lora is None else ctypes.addressof(lora.of_tokens.step)
        step.lora_of_rows = None if lora is None else ctypes.addressof(lora.of_rows.step)
        step.states = pointer(states)
        step.draw = None if draw is None else ctypes.addressof(draw.arguments)
        self._run(self._model, step)
        if prepared.logits is not None:
            if draw is not None:
                draw.note_drawn(prepared.logits)
            return prepared.logits
        assert states is not None
        return states

    def _find(self, batch: StepInput) -> _Prepared | None:
        """Returns the pass that points to these arrays, or None if there is none."""
        found = self._prepared.get(id(batch.token_ids))
        if found is None:
            return None
        arrays = _arrays(batch)
        return found if len(arrays) == len(found.arrays) and all(map(is_, arrays, found.arrays)) else None

    def _prepare(self, batch: StepInput) -> _Prepared:
        num_tokens, num_rows = len(batch.token_ids), len(batch.logits_rows)
        self._make_room(num_tokens, num_rows)
        groups = (Group * self._num_groups)()
        for group, slots, table in zip(groups, batch.slot_mappings, batch.block_tables, strict=True):
            group.slots, group.table = address(slots), address(table)
            group.table_row, group.table_width = table.strides[0] // 4, table.shape[1]
        step = Pass(groups=ctypes.addressof(groups), scratch=self._scratch.data_ptr())
        step.num_tokens, step.num_rows = num_tokens, num_rows
        step.logits = pointer(self._logits)
        step.tokens, step.positions = address(batch.token_ids), address(batch.positions)
        step.context_lens, step.num_seqs = address(batch.context_lens), len(batch.context_lens)
        one_each = len(batch.token_ids) == len(batch.context_lens)
        step.cu_seqlens_q = None if one_each else address(batch.cu_seqlens_q)
        step.rows = None if len(batch.logits_rows) == len(batch.token_ids) else address(batch.logits_rows)
        logits = None
        if self._logits is not None and (logits := self._wanted.get(num_rows)) is None:
            logits = self._wanted[num_rows] = self._logits[:num_rows]
        if len(self._prepared) >= _MOST_PREPARED:
            self._prepared.clear()
        prepared = self._prepared[id(batch.token_ids)] = _Prepared(_arrays(batch), step, groups, logits)
        return prepared

    def _make_room(self, num_tokens: int, num_rows: int) -> None:
        """Allocates memory for a pass of this size, and keeps the memory for later passes."""
        if (need := scratch_bytes(self._model, num_tokens, num_rows)) > len(self._scratch):
            self._prepared.clear()
            self._scratch = scratch(0)  # frees the old memory before the new memory is allocated
            self._scratch = scratch(need)
        if self._logits is not None and num_rows > len(self._logits):
            self._prepared.clear()
            self._wanted.clear()
            self._logits = torch.empty((num_rows, self._logits.shape[1]))


def _arrays(batch: StepInput) -> tuple[object, ...]:
    rows = (batch.token_ids, batch.positions, batch.cu_seqlens_q, batch.context_lens, batch.logits_rows)
    return (*rows, *batch.slot_mappings, *batch.block_tables)


def _model(decoder: Decoder, c: ModelConfig, cache: LayerCache, layers: ctypes.Array[Layer]) -> Model:
    max_pos, rotary = decoder.layers[0].cos_sin.shape
    block, head, slot, _ = cache.values.stride()
    dtype, experts, o = decoder.dtype, c.experts, decoder.layers[0].o
    num_sums = o.num_sums if isinstance(o, RowParallelLinear) else 0
    ranks = ctypes.addressof(o.ranks) if isinstance(o, RowParallelLinear) and o.ranks is not None else None
    return Model(
        embed=pointer(decoder.embed), layers=ctypes.addressof(layers), norm=pointer(decoder.norm),
        ranks=ranks, num_sums=num_sums, lm_head=Linear() if decoder.lm_head is None else _linear(decoder.lm_head),
        num_layers=len(layers), hidden=c.hidden_size, vocab=c.vocab_size,
        heads=decoder.attention.num_heads, kv_heads=decoder.attention.num_kv_heads, d=c.head_dim, max_pos=max_pos,
        rotary=rotary, is_bf16=dtype == torch.bfloat16,
        inner=max(layer.mlp.linears[-1].in_features for layer in decoder.layers),
        gelu=c.activation == "gelu_tanh", wide_norms=decoder.layers[0].input_norm.dtype == torch.float32,
        num_experts=experts.count if experts else 0, per_token=experts.per_token if experts else 0,
        renormalize=experts.renormalize if experts else 0, round_weights=experts.round_weights if experts else 0,
        num_blocks=cache.values.shape[0], block_size=cache.values.shape[2], cache_block=block, cache_head=head,
        cache_slot=slot, by_word=is_by_word(cache.keys), kv_type=kv_type(cache.values.dtype, dtype), eps=c.norm_eps,
        scale=c.scale_of_scores, softcap=c.softcap or 0.0,
        logits_softcap=c.logits_softcap or 0.0, embed_scale=torch.tensor(c.embed_scale, dtype=dtype).item(),
    )  # fmt: skip


def _layer(layer: DecoderLayer, cache: LayerCache, group: int, experts: ctypes.Array[Linear]) -> Layer:
    found = Layer(
        input_norm=pointer(layer.input_norm), q_norm=pointer(layer.q_norm), k_norm=pointer(layer.k_norm),
        attention_norm=pointer(layer.attention_norm), mlp_norm=pointer(layer.mlp_norm),
        output_norm=pointer(layer.output_norm), keys=pointer(cache.keys), values=pointer(cache.values),
        cos_sin=pointer(layer.cos_sin), qkv=_linear(layer.qkv), o=_linear(layer.o), group=group,
        window=layer.window or 0,
    )  # fmt: skip
    if isinstance(layer.mlp, Mlp):
        found.gate_up, found.down = map(_linear, layer.mlp.linears)
    else:
        found.router, found.experts = _linear(layer.mlp.router), ctypes.addressof(experts)
    return found


def _experts(layer: DecoderLayer) -> ctypes.Array[Linear]:
    """Returns the projections of a layer's experts. The array is empty if the layer has one MLP."""
    experts = layer.mlp.experts if isinstance(layer.mlp, Mixture) else ()
    linears = [_linear(linear) for expert in experts for linear in expert.linears]
    return (Linear * len(linears))(*linears)


def _linear(linear: Projection) -> Linear:
    if isinstance(linear, RowParallelLinear):
        sizes = (linear.in_features, linear.out_features, linear.num_parts, -1)
        return Linear(None, pointer(linear.bias), None, ctypes.addressof(linear.addresses), *sizes)
    entries = {"amx": amx.address, "int4": linear_int.address, "int8": linear_int.address}
    at = entries[linear.how]() if linear.how in entries else None
    site = -1 if linear.site is None else linear.site
    sizes = (linear.in_features, linear.out_features, 1, site)
    return Linear(pointer(linear.packed), pointer(linear.bias), at, None, *sizes)
