"""Makes transformers' rotary positions a function of the position alone. A cached key then does not depend on the other
tokens of its pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace

import torch
from torch import Tensor, nn

LayerType = str | None
"""A type of layers with separate rotary positions; None in models whose layers all have the same rotary positions."""


def steady_rope(model: nn.Module, max_len: int) -> None:
    """Fixes the frequencies that transformers would otherwise choose in every pass, by the pass's highest position.
    LongRoPE chooses its table once, by the maximum sequence length, as in vLLM. With dynamic NTK, position p has the
    base of a sequence of p + 1 tokens, as in transformers when it decodes token by token and keeps the rotated keys.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        by_type: Mapping[LayerType, str | None] = kinds if isinstance(kinds, dict) else {None: kinds}
        for layer_type in [each for each, kind in by_type.items() if kind == "longrope"]:
            _choose_once(module, layer_type, max_len)
        lengths = torch.arange(1, max_len + 1)[:, None]
        growing = [each for each, kind in by_type.items() if kind == "dynamic"]
        if tables := {each: _frequencies(module, "dynamic", each, lengths)[0] for each in growing}:
            module.forward = _by_position(module, tables)


def _frequencies(module: nn.Module, kind: str, layer_type: LayerType, length: int | Tensor) -> tuple[Tensor, float]:
    """Returns the frequencies for sequences of `length` tokens, and the factor by which cosine and sine are multiplied.
    The frequencies are fp32 [D/2] if `length` is an int, and [L, D/2] if it is int64 [L, 1].
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    found, scaling = ROPE_INIT_FUNCTIONS[kind](module.config, seq_len=length, **_of(layer_type))  # type: ignore[arg-type]
    return found.to(getattr(module, f"{_prefix(layer_type)}inv_freq").device), scaling


def _choose_once(module: nn.Module, layer_type: LayerType, max_len: int) -> None:
    frequencies, scaling = _frequencies(module, "longrope", layer_type, max_len)
    setattr(module, f"{_prefix(layer_type)}inv_freq", frequencies)
    setattr(module, f"{_prefix(layer_type)}attention_scaling", scaling)
    if layer_type is None:  # "default", so that transformers no longer chooses a table
        module.rope_type = "default"  # type: ignore[assignment]
    else:
        module.rope_type = {**module.rope_type, layer_type: "default"}  # type: ignore


def _by_position(module: nn.Module, tables: Mapping[LayerType, Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Returns a `forward` for the module that looks up the frequencies of each position in `tables`, fp32 [max_len,
    D/2] for each type of layer. Types without a table keep their frequencies. `forward` is thread-safe.
    """

    def forward(x: Tensor, position_ids: Tensor, layer_type: LayerType = None) -> tuple[Tensor, Tensor]:
        this: object = module
        if layer_type in tables:
            scaling, prefix = f"{_prefix(layer_type)}attention_scaling", _prefix(layer_type)
            this = SimpleNamespace(
                config=module.config, rope_type="default" if layer_type is None else {layer_type: "default"},
                **{f"{prefix}inv_freq": tables[layer_type][position_ids], scaling: getattr(module, scaling)},
            )  # fmt: skip
        return type(module).forward(this, x, position_ids, **_of(layer_type))  # type: ignore

    return forward


def _prefix(layer_type: LayerType) -> str:
    """Returns the prefix that a module's attribute names have for a type of layer."""
    return "" if layer_type is None else f"{layer_type}_"


def _of(layer_type: LayerType) -> dict[str, str]:
    return {} if layer_type is None else {"layer_type": layer_type}
