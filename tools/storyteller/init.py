"""Sets initial weights that can copy names: a "previous token" head in layer 0 and an "induction" head in layer 1.

A coherent story repeats the names of its characters, and a circuit that copies them takes two layers (Olsson et al.
2022, arXiv:2209.11895). All other weights are random. It is not certain that this initialization helped. The first
attempt without it, which confused names after 2 million tokens, also had a narrow embedding and a constant, higher
learning rate.
"""

from __future__ import annotations

import torch

from .model import Attention, Llama

CONSTANT = 1.2
"""The value of the last embedding dimension for every token, which lets a head depend only on positions."""
SHARPNESS, MATCH, PREVIOUS, COPY = 60.0, 4.0, 2.0, 5.0
"""SHARPNESS and MATCH are the scales of the attention logits for positions and for content. PREVIOUS and COPY are the
scales of the two heads' outputs.
"""
SLOW = 0.01
"""The speed of rotation in radians per token below which content can be compared over the length of a story."""


@torch.no_grad()
def plant_copying(model: Llama) -> None:
    """Overwrites KV head 0 and its query heads in layers 0 and 1, and makes the last embedding dimension constant."""
    shape = model.shape
    hidden, head_dim = shape.hidden_size, shape.head_dim
    embedding = model.model.embed_tokens.weight
    scale = float(embedding.std())
    embedding[:, -1] = CONSTANT
    seen = CONSTANT / float(embedding.square().mean(1).sqrt().mean())  # the constant after RMSNorm
    basis = torch.linalg.qr(torch.randn(hidden - 1, hidden - 1))[0]
    basis = torch.cat((basis, torch.zeros(hidden - 1, 1)), 1)  # orthonormal rows that do not affect the constant
    freqs = shape.rope_theta ** -(torch.arange(head_dim // 2) / (head_dim // 2))
    slow = [f for f in range(head_dim // 2) if freqs[f] < SLOW]
    dims = slow + [f + head_dim // 2 for f in slow]
    current, previous, copied = basis[: len(dims)], basis[len(dims) : 2 * len(dims)], basis[2 * len(dims) :][:head_dim]

    first, second = model.model.layers[0].self_attn, model.model.layers[1].self_attn
    _clear(first, head_dim)
    _clear(second, head_dim)
    half, amplitude = head_dim // 2, SHARPNESS**0.5 / seen
    first.k_proj.weight[:half, -1] = amplitude
    first.v_proj.weight[: len(dims)] = current
    second.k_proj.weight[dims] = previous * (MATCH / PREVIOUS)
    second.v_proj.weight[:head_dim] = copied
    groups = shape.num_heads // shape.num_kv_heads
    for start in range(0, groups * head_dim, head_dim):  # the query heads of KV head 0
        # the key's vector, turned back by one position: the score is highest for the previous token
        first.q_proj.weight[start : start + half, -1] = amplitude * freqs.cos()
        first.q_proj.weight[start + half : start + head_dim, -1] = -amplitude * freqs.sin()
        first.o_proj.weight[:, start : start + len(dims)] = previous.T * (PREVIOUS * scale / groups)
        second.q_proj.weight[[start + d for d in dims]] = current * MATCH
        second.o_proj.weight[:, start : start + head_dim] = copied.T * (COPY * scale / groups)


def _clear(attention: Attention, head_dim: int) -> None:
    """Sets the weights of KV head 0 and of the query heads that read it to zero."""
    width = attention.num_heads // attention.num_kv_heads * head_dim
    for projection in (attention.k_proj, attention.v_proj):
        projection.weight[:head_dim] = 0
    attention.q_proj.weight[:width] = 0
    attention.o_proj.weight[:, :width] = 0


class Planted:
    """The weights of the heads that `plant_copying` has set. `restore` sets them again after a training step, so that
    the other weights learn to use them.

    Muon's updates are equally large in every direction, and would otherwise soon erase both heads.
    """

    def __init__(self, model: Llama) -> None:
        width = model.shape.num_heads // model.shape.num_kv_heads * model.shape.head_dim
        self._views = [model.model.embed_tokens.weight[:, -1]]
        for layer in list(model.model.layers)[:2]:
            attention = layer.self_attn
            self._views += [p.weight[: model.shape.head_dim] for p in (attention.k_proj, attention.v_proj)]
            self._views += [attention.q_proj.weight[:width], attention.o_proj.weight[:, :width]]
            self._views.append(layer.input_layernorm.weight[:])
        self._views = [view.detach() for view in self._views]
        self._values = [view.clone() for view in self._views]

    def restore(self) -> None:
        for view, value in zip(self._views, self._values, strict=True):
            view.copy_(value)
