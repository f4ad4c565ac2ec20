"""Makes transformers' rotary positions a function of the position alone, so that a cached key never depends on the
other tokens of its pass.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from engine.errors import UnsupportedModel

CHANGING = ("dynamic", "longrope")
"""Kinds whose frequencies transformers chooses in every pass, by the highest position in it."""


def steady_rope(model: nn.Module, max_len: int) -> None:
    """Fixes the frequencies of every module with rotary positions. Raises UnsupportedModel.

    LongRoPE chooses its table once, by the maximum sequence length, as vLLM does. Dynamic NTK gives position p the base
    of a sequence of p + 1 tokens, as transformers does when it decodes token by token and keeps the rotated keys.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict) and set(CHANGING) & set(kind.values()):
            raise UnsupportedModel(f"{type(module).__name__} changes the frequencies of some layers in every pass")
        if kind == "longrope":
            frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](module.config, seq_len=max_len)
            module.inv_freq, module.attention_scaling = frequencies.to(module.inv_freq.device), scaling  # type: ignore
            module.rope_type = "default"  # so that transformers no longer chooses a table
        elif kind == "dynamic":
            lengths = torch.arange(1, max_len + 1)[:, None]
            frequencies, _ = ROPE_INIT_FUNCTIONS[kind](module.config, seq_len=lengths)
            module.forward = _by_position(module, frequencies.to(module.inv_freq.device))  # type: ignore[arg-type]


def _by_position(module: nn.Module, frequencies: Tensor) -> Callable[..., tuple[Tensor, Tensor]]:
    """Returns the module's `forward` with a row of `frequencies`, fp32 [max_len, D/2], for each position. It does not
    change the module, because two threads may run it at once.
    """

    def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        fixed = SimpleNamespace(
            inv_freq=frequencies[position_ids], attention_scaling=module.attention_scaling, config=module.config,
            rope_type="default",
        )  # fmt: skip
        return type(module).forward(fixed, x, position_ids)  # type: ignore

    return forward
