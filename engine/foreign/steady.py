"""Computes elementwise functions on a CPU so that a result depends only on its element.

torch computes `exp` and similar functions in SIMD vectors. It computes the remaining elements of a thread's share one
by one, with a different library. The last bits of a row would therefore depend on the number of rows before it and on
the number of threads. This module pads the input to whole vectors and computes on one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

PIECE = 16_384
"""The number of elements in a piece. torch uses a second thread from 32,768 elements on."""
VECTORS = 64
"""Number of elements in two AVX-512 vectors of bf16, the most that torch computes at once."""
ELEMENTWISE: frozenset[Callable[..., Any]] = frozenset(
    getattr(owner, name)
    for owner in (torch, Tensor, F)
    for name in (
        "cos", "elu", "erf", "exp", "exp2", "expm1", "gelu", "log", "log1p", "logsigmoid", "mish", "selu", "sigmoid",
        "silu", "sin", "softplus", "tanh",
    )
    if hasattr(owner, name)
)  # fmt: skip


class Steady(TorchFunctionMode):
    """A torch mode in which ELEMENTWISE functions of CPU tensors run reproducibly, on the calling thread."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in ELEMENTWISE:
            x = args[0] if args else kwargs.pop("input")
            kwargs.pop("inplace", None)  # the caller uses the result in any case
            return steady(lambda piece: func(piece, *args[1:], **kwargs), x)
        return func(*args, **kwargs)


def steady(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Applies `function` to every element of `x`, reproducibly if `x` is on a CPU. Returns a new tensor."""
    return steadily(function, x) if x.device.type == "cpu" else function(x)


def steadily(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Applies `function` to every element of `x` (of any shape) reproducibly. Returns a new tensor."""
    flat = x.reshape(-1)
    if len(flat) <= PIECE and len(flat) % VECTORS == 0 and flat.is_contiguous():
        return function(flat).view(x.shape)
    return torch.cat([_piece(function, piece) for piece in flat.split(PIECE)]).view(x.shape)


def _piece(function: Callable[[Tensor], Tensor], piece: Tensor) -> Tensor:
    over = -len(piece) % VECTORS
    return function(F.pad(piece, (0, over)) if over else piece.contiguous())[: len(piece)]
