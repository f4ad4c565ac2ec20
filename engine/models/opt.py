"""The definition of OPT, which has learned positions, LayerNorm before each sublayer (in OPT-350m after it), ReLU, and
biases. In some of the models, embeddings are narrower than hidden states.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch.nn.functional import embedding, layer_norm

from engine.config import ModelConfig
from engine.loader import Weights
from engine.models.attention import Attention, LayerCache, StepMetadata
from kernels.linear import PackedLinear

POSITION_OFFSET = 2
"""Row of position 0 in OPT's position table (an effect of fairseq's padding index)."""


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """A LayerNorm with weight and bias [h]. torch computes each row separately, and in fp32 even for bf16."""

    weight: torch.Tensor
    bias: torch.Tensor
    eps: float

    @classmethod
    def load(cls, config: ModelConfig, weights: Weights, name: str) -> LayerNorm:
        size = config.hidden_size
        return cls(weights.tensor(f"{name}.weight", size), weights.tensor(f"{name}.bias", size), config.norm_eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class OptLayer:
    """The parameters of one layer of OPT."""

    attention_norm: LayerNorm
    qkv: PackedLinear  # h -> 3 h
    o: PackedLinear  # h -> h
    mlp_norm: LayerNorm
    fc1: PackedLinear  # h -> i
    fc2: PackedLinear  # i -> h

    @classmethod
    def load(cls, config: ModelConfig, weights: Weights, prefix: str) -> OptLayer:
        h, attn = config.hidden_size, f"{prefix}self_attn."
        layer = cls(
            attention_norm=LayerNorm.load(config, weights, f"{prefix}self_attn_layer_norm"),
            qkv=weights.linear([f"{attn}q_proj", f"{attn}k_proj", f"{attn}v_proj"], [h] * 3, h, bias=config.qkv_bias),
            o=weights.linear([f"{attn}out_proj"], [h], h, bias=config.o_bias),
            mlp_norm=LayerNorm.load(config, weights, f"{prefix}final_layer_norm"),
            fc1=weights.linear([f"{prefix}fc1"], [config.intermediate_size], h, bias=config.mlp_bias),
            fc2=weights.linear([f"{prefix}fc2"], [h], config.intermediate_size, bias=config.mlp_bias),
        )
        weights.layer_done()
        return layer


class Opt:
    """A model that maps token ids [T] to logits of the requested rows [R, vocab], like `Decoder`."""

    def __init__(self, config: ModelConfig, weights: Weights, max_len: int) -> None:
        c = config
        # In checkpoints of OPTModel (such as Facebook's own), names lack the prefix "model.".
        at = "model.decoder." if weights.has("model.decoder.embed_tokens.weight") else "decoder."
        self._norm_before = c.norm_before
        self._vocab_size = c.vocab_size
        self._attention = Attention(c.num_heads, c.num_kv_heads, c.head_dim)
        self._embed = weights.tensor(f"{at}embed_tokens.weight", c.vocab_size, c.embed_dim)
        self._positions = weights.tensor(
            f"{at}embed_positions.weight", c.max_model_len + POSITION_OFFSET, c.hidden_size
        )
        narrow = c.embed_dim != c.hidden_size
        self._project_in = weights.linear([f"{at}project_in"], [c.hidden_size], c.embed_dim) if narrow else None
        self._project_out = weights.linear([f"{at}project_out"], [c.embed_dim], c.hidden_size) if narrow else None
        self._layers = [OptLayer.load(c, weights, f"{at}layers.{i}.") for i in range(c.num_layers)]
        self.sites = weights.sites
        self._final_norm = LayerNorm.load(c, weights, f"{at}final_layer_norm") if c.final_norm else None
        tied = c.tie_embeddings
        self._lm_head = weights.pack(self._embed) if tied else weights.linear(["lm_head"], [c.vocab_size], c.embed_dim)
        weights.finish(allowed=["lm_head.weight"] if tied else [])

    def shallow(self, num_layers: int) -> Self:
        """Returns the same model with fewer layers (see `Decoder.shallow`)."""
        model = copy.copy(self)
        model._layers = self._layers[:num_layers]
        return model

    def forward(
        self, token_ids: torch.Tensor, step: StepMetadata, caches: Mapping[int, LayerCache], rows: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns logits [R, vocab] of `rows` (int64 [R], indices into T; None: all), in the model's dtype."""
        x = self.hidden(token_ids, step, caches, rows)
        return self._lm_head(x) if len(x) else x.new_empty((0, self._vocab_size))

    def hidden(
        self, token_ids: torch.Tensor, step: StepMetadata, caches: Mapping[int, LayerCache], rows: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns the hidden states [R, embed_dim] of `rows`, from which `forward` computes the logits."""
        x = embedding(token_ids, self._embed)  # [T, embed_dim]
        if self._project_in is not None:
            x = self._project_in(x)
        x = x + embedding(step.positions + POSITION_OFFSET, self._positions)  # [T, h]
        last = len(self._layers) - 1
        for index in range(len(self._layers)):
            x = self._layer(index, x, caches[index], step, rows if index == last else None)
        if not len(x):
            return x
        if self._final_norm is not None:
            x = self._final_norm(x)
        if self._project_out is not None:
            x = self._project_out(x)
        return x

    def _layer(
        self, index: int, x: torch.Tensor, cache: LayerCache, step: StepMetadata, rows: torch.Tensor | None
    ) -> torch.Tensor:
        layer = self._layers[index]
        normed = layer.attention_norm(x) if self._norm_before else x
        attended = self._attention(self._attention.split(step.linear(layer.qkv, normed)), cache, step, index, None)
        if rows is not None:  # the last layer: drop the rows without requested logits
            x, attended = x[rows], attended[rows]
            if not len(rows):
                return x
        product = step.linear if rows is None else step.linear_of_rows
        x = x + product(layer.o, attended)
        if not self._norm_before:
            x = layer.attention_norm(x)
        normed = layer.mlp_norm(x) if self._norm_before else x
        x = x + product(layer.fc2, product(layer.fc1, normed).relu_())
        return x if self._norm_before else layer.mlp_norm(x)
