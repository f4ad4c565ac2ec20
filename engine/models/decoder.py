"""The decoder of all native families except OPT, with RMSNorm, rotary positions, grouped queries, and gated MLPs or
experts.

`ModelConfig` describes the differences between the families (biases, norms, windows, activation, experts).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Self

import torch
from torch.nn.functional import embedding

from engine.config import ModelConfig
from engine.loader import Weights
from engine.models.attention import Attention, LayerCache, Projection, StepMetadata
from engine.models.mlp import Mixture, Mlp
from engine.models.rope import cos_sin_table
from engine.rope_config import RopeConfig
from kernels.linear import PackedLinear
from kernels.rms_norm import rms_norm
from kernels.softcap import softcap_


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """The parameters of one layer. h is the hidden size, q is heads * head_dim, kv is kv_heads * head_dim, and i is the
    intermediate size. A rank has its share of q, kv and i.
    """

    input_norm: torch.Tensor  # [h]
    qkv: PackedLinear  # h -> q + 2 kv
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None
    cos_sin: torch.Tensor  # fp32 [max_len, rotated dimensions]
    window: int | None
    o: Projection  # q -> h
    attention_norm: torch.Tensor | None  # [h], for the output of attention
    mlp_norm: torch.Tensor  # [h]
    mlp: Mlp | Mixture
    output_norm: torch.Tensor | None  # [h], for the output of the MLP

    @classmethod
    def load(cls, config: ModelConfig, weights: Weights, index: int, cos_sin: torch.Tensor) -> DecoderLayer:
        c, at = config, f"model.layers.{index}."
        q, kv, attn = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, f"{at}self_attn."
        names, sizes = [f"{attn}q_proj", f"{attn}k_proj", f"{attn}v_proj"], [[q], [kv], [kv]]
        if c.fused_projections:
            names, sizes = [f"{attn}qkv_proj"], [[q, kv, kv]]
        after_attention = f"{at}post_attention_layernorm"
        layer = cls(
            input_norm=load_norm(c, weights, f"{at}input_layernorm"),
            qkv=weights.columns(names, sizes, c.hidden_size, bias=c.qkv_bias),
            q_norm=load_norm(c, weights, f"{attn}q_norm", c.head_dim) if c.qk_norm else None,
            k_norm=load_norm(c, weights, f"{attn}k_norm", c.head_dim) if c.qk_norm else None,
            cos_sin=cos_sin,
            window=c.layers[index].window,
            o=weights.rows(f"{attn}o_proj", c.hidden_size, q, bias=c.o_bias),
            attention_norm=load_norm(c, weights, after_attention) if c.sandwich_norms else None,
            mlp_norm=load_norm(c, weights, f"{at}pre_feedforward_layernorm" if c.sandwich_norms else after_attention),
            mlp=_load_mlp(c, weights, index, at),
            output_norm=load_norm(c, weights, f"{at}post_feedforward_layernorm") if c.sandwich_norms else None,
        )
        weights.layer_done()
        return layer


def _load_mlp(c: ModelConfig, weights: Weights, index: int, at: str) -> Mlp | Mixture:
    if c.experts is None or index in c.experts.dense_layers:
        return Mlp.load(c, weights, f"{at}mlp.")
    return Mixture.load(c, c.experts, weights, at)


def load_norm(c: ModelConfig, weights: Weights, name: str, size: int | None = None) -> torch.Tensor:
    """Returns the weight of an RMS norm [size or h]. It is in fp32 if the norm multiplies before it rounds (Gemma)."""
    weight = weights.tensor(f"{name}.weight", size or c.hidden_size)
    return 1.0 + weight.float() if c.norm_offset else weight


class Decoder:
    """A model, or a stage of one (`engine.ranks.stage`), that maps token ids [T] to logits of the requested rows [R,
    vocab], with K and V in blocks.
    """

    def __init__(self, config: ModelConfig, weights: Weights, max_len: int) -> None:
        c = config

        @cache
        def table(rope: RopeConfig | None) -> torch.Tensor:
            assert rope is not None
            return cos_sin_table(rope, c.head_dim, max_len).to(weights.device)

        tables = [table(c.window_rope or c.rope if layer.window else c.rope) for layer in c.layers]
        self.eps, self.dtype = c.norm_eps, weights.dtype
        self._embed_scale = c.embed_scale
        size = weights.shard.size
        self.attention = Attention(c.num_heads // size, c.num_kv_heads // size, c.head_dim)
        self._logits_softcap = c.logits_softcap
        own, is_last, tied = weights.stage.layers(c.num_layers), weights.stage.is_last, c.tie_embeddings
        self.embed = self._load_embed(c, weights) if weights.stage.is_first else None
        self.first_layer = own.start
        self.layers = [DecoderLayer.load(c, weights, i, tables[i]) for i in own]
        self.norm = load_norm(c, weights, "model.norm") if is_last else None
        self.sites = weights.sites
        self.lm_head = self._load_head(c, weights) if is_last else None
        others = [f"model.layers.{i}." for i in range(c.num_layers) if i not in own]
        ends = [] if weights.stage.is_whole else ["model.embed_tokens.", "model.norm.", "lm_head."]
        weights.finish(allowed=["lm_head.weight"] if tied else [], elsewhere=(*others, *ends))

    @staticmethod
    def _load_embed(c: ModelConfig, weights: Weights) -> torch.Tensor:
        return weights.tensor("model.embed_tokens.weight", c.vocab_size, c.hidden_size)

    def _load_head(self, c: ModelConfig, weights: Weights) -> PackedLinear:
        if not c.tie_embeddings:
            return weights.columns(["lm_head"], [[c.vocab_size]], c.hidden_size)
        embed = self._load_embed(c, weights) if self.embed is None else self.embed
        return weights.pack(embed, is_kept=self.embed is not None)

    def shallow(self, num_layers: int) -> Self:
        """Returns a model of the first `num_layers` layers with the same weights, to measure the peak memory of a step.
        Its results are different.
        """
        model = copy.copy(self)
        model.layers = self.layers[:num_layers]
        return model

    def forward(
        self, inputs: torch.Tensor, step: StepMetadata, caches: Mapping[int, LayerCache], rows: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns logits [R, vocab] of `rows`, in the model's dtype, or in fp32 if the logits have a softcap. `rows`
        contains indices into T (int64 [R]); None means all rows. A rank returns only the columns of its share of the
        vocabulary. A stage other than the last stage returns the result of `hidden`.
        """
        x = self.hidden(inputs, step, caches, rows)
        if self.lm_head is None:
            return x
        logits = self.lm_head(x) if len(x) else x.new_empty((0, self.lm_head.out_features))
        return logits if self._logits_softcap is None else softcap_(logits.float(), self._logits_softcap)

    def hidden(
        self, inputs: torch.Tensor, step: StepMetadata, caches: Mapping[int, LayerCache], rows: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns the hidden states [R, h] of `rows` after the last norm, from which `forward` computes the logits. A
        stage other than the last stage returns the residual [T, h] after its layers, which the next stage takes as
        `inputs` instead of token ids.
        """
        residual = self._embedded(inputs)  # [T, h]
        x = rms_norm(residual, self.layers[0].input_norm, self.eps)
        last = len(self.layers) - 1
        for number, layer in enumerate(self.layers):
            x = self._attend(self.first_layer + number, step.linear(layer.qkv, x), caches, step)  # [T, q]
            product = step.linear
            if number == last and self.norm is not None and rows is not None:  # drop the rows without requested logits
                product = step.linear_of_rows
                if not len(rows):
                    return residual[:0]
                x, residual = x[rows], residual[rows]
            x = self._normed(product(layer.o, x), layer.attention_norm)
            x, residual = rms_norm(x, layer.mlp_norm, self.eps, residual)
            x = self._normed(layer.mlp(x, product), layer.output_norm)
            norm = self.norm if number == last else self.layers[number + 1].input_norm
            if norm is None:
                return residual + x
            x, residual = rms_norm(x, norm, self.eps, residual)
        return x

    def _embedded(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.embed is None:
            return inputs
        embedded = embedding(inputs, self.embed)
        if self._embed_scale == 1.0:
            return embedded
        return embedded * torch.tensor(self._embed_scale, dtype=embedded.dtype)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return x if weight is None else rms_norm(x, weight, self.eps)

    def _attend(
        self, index: int, qkv: torch.Tensor, caches: Mapping[int, LayerCache], step: StepMetadata
    ) -> torch.Tensor:
        layer, (q, k, v) = self.layers[index - self.first_layer], self.attention.split(qkv)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = rms_norm(q.reshape(-1, q.shape[-1]), layer.q_norm, self.eps).view(q.shape)
            k = rms_norm(k.reshape(-1, k.shape[-1]), layer.k_norm, self.eps).view(k.shape)
        return self.attention((q, k, v), caches[index], step, index, layer.cos_sin)
