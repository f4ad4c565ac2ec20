"""Linear layers with weights packed once; on a GPU cuBLAS, or Triton where rows must not depend on others.

On a CPU no row depends on the others, as tests/kernels/test_linear.py holds. bf16 on Intel's AMX tiles is ours
(`kernels.cpu.amx`): oneDNN's cuts the sum over inputs into pieces from 33 rows on. Everything else is oneDNN's,
measured to give a row the same bits at every batch but for a row alone (fp32, some bf16 shapes), which is padded to
two. Knows nothing of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu import amx
from kernels.cpu.loader import count_fallback, on_triton

Product = Callable[[Tensor], Tensor]
"""x [rows, in], at least one row -> [rows, out]."""
ONEDNN_AMX_ROWS = 32
"""The most rows for which oneDNN's AMX product adds up a row's products in one order."""


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in], weight [out, in], bias [out] -> [..., out]."""
    return F.linear(x, weight, bias)


def _on_amx(weight: Tensor, bias: Tensor | None) -> Product | None:
    """Our product on AMX tiles, None where it does not apply."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not amx.available():
        return None
    n_out, n_in = weight.shape
    if n_in % amx.DEPTH:
        why = f"AMX takes numbers of inputs that are multiples of {amx.DEPTH}, not {n_in}"
        count_fallback("linear", why, f"on oneDNN, {ONEDNN_AMX_ROWS} rows at a time")
        return None
    packed = amx.pack(weight)
    return lambda x: amx.linear(x if x.stride(1) == 1 else x.contiguous(), packed, bias, n_out)


def _on_onednn(weight: Tensor, bias: Tensor | None) -> Product | str:
    """oneDNN's product over a weight in its own layout, or why it cannot be had."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.bfloat16, torch.float32):
        return f"no packed form of {weight.dtype} on {weight.device.type}"
    if not torch.backends.mkldnn.is_available():
        return "this torch has no oneDNN"
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "oneDNN has no bf16 on this CPU"
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    except (RuntimeError, AttributeError) as error:
        return f"packing failed: {str(error).splitlines()[0]}"

    def product(x: Tensor) -> Tensor:
        alone = x.shape[0] == 1
        x = torch.cat((x, x)) if alone else x
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return out[:1] if alone else out

    def by_parts(x: Tensor) -> Tensor:
        return torch.cat([product(part) for part in x.split(ONEDNN_AMX_ROWS)])

    in_pieces = weight.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    return by_parts if in_pieces else product


class PackedLinear:
    """y = x @ weight.T + bias, prepacked. Keeps no unpacked copy of the weight unless asked.

    weight: [out, in] bf16 or fp32; bias: [out] in the same dtype, or None. What cannot be packed, or does not agree
    with F.linear on a probe, runs through F.linear: logged once and counted under "linear".
    On a GPU nothing is packed (fp16 too): F.linear, or with `deterministic` the Triton kernel of fixed tiles.
    """

    __slots__ = ("_product", "bias", "how", "in_features", "out_features", "weight")

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, keep_weight: bool = False, deterministic: bool = False
    ) -> None:
        self.out_features, self.in_features = weight.shape
        weight = weight.detach()
        self.bias = None if bias is None else bias.detach()
        self.how: Literal["amx", "onednn", "triton", "torch"]
        self.how, self._product = _choose(weight, self.bias, deterministic)
        self.weight = weight if keep_weight or not self.is_packed else None

    @property
    def is_packed(self) -> bool:
        return self.how in ("amx", "onednn")

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., in] in the weight's dtype -> [..., out]."""
        rows = x.reshape(-1, self.in_features)
        if rows.shape[0] == 0:
            return x.new_empty((*x.shape[:-1], self.out_features))
        return self._product(rows).view(*x.shape[:-1], self.out_features)


def _choose(
    weight: Tensor, bias: Tensor | None, deterministic: bool
) -> tuple[Literal["amx", "onednn", "triton", "torch"], Product]:
    if on_triton(weight):
        if not deterministic:
            return "torch", lambda x: F.linear(x, weight, bias)
        from kernels.gpu.linear import linear

        return "triton", lambda x: linear(x, weight, bias)
    if (ours := _on_amx(weight, bias)) is not None and _agrees(ours, weight, bias):
        return "amx", ours
    found = _on_onednn(weight, bias)
    if not isinstance(found, str):
        if _agrees(found, weight, bias):
            return "onednn", found
        found = "the packed product differs from F.linear"
    count_fallback("linear", found)
    return "torch", lambda x: F.linear(x, weight, bias)


def _agrees(product: Product, weight: Tensor, bias: Tensor | None) -> bool:
    """Compares with F.linear on four fixed rows, within the rounding of the dtype."""
    probe = torch.linspace(-1, 1, 4 * weight.shape[1]).view(4, -1).sin().to(weight.dtype)
    want, got = F.linear(probe, weight, bias).float(), product(probe).float()
    tolerance = 2e-2 if weight.dtype == torch.bfloat16 else 1e-4
    return bool((got - want).abs().max() <= tolerance * (want.abs().max() + 1e-6))
