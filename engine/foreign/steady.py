"""Elementwise functions on a CPU whose results depend only on the element.

torch computes `exp` and similar functions in vectors. It computes the elements left over at the end of a thread's share
one by one, with another library. A row's last bits would therefore depend on the number of rows before it and on the
number of threads. Here such functions get pieces that consist of whole vectors and that one thread computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

PIECE = 16_384
"""In elements; below the 32,768 from which torch uses a second thread."""
VECTORS = 64
"""Elements of two vectors of bf16 in AVX-512, the most that torch takes at once."""
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
    """A mode in which the ELEMENTWISE functions of CPU tensors are computed steadily, by the calling thread."""

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
    """Applies `function` to every element of `x`, steadily if it is on a CPU. Returns a new tensor."""
    return steadily(function, x) if x.device.type == "cpu" else function(x)


def steadily(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Applies `function` to every element of `x`, of any shape. Returns a new tensor."""
    flat = x.reshape(-1)
    if len(flat) <= PIECE and len(flat) % VECTORS == 0 and flat.is_contiguous():
        return function(flat).view(x.shape)
    return torch.cat([_piece(function, piece) for piece in flat.split(PIECE)]).view(x.shape)


def _piece(function: Callable[[Tensor], Tensor], piece: Tensor) -> Tensor:
    over = -len(piece) % VECTORS
    return function(F.pad(piece, (0, over)) if over else piece.contiguous())[: len(piece)]
