"""Linear layers with weights packed once for oneDNN; on a GPU cuBLAS, or Triton where rows must not depend on others.

Row-invariant on a CPU: no row depends on the others. Measured, and held by tests/kernels/test_linear.py:
oneDNN's product gives a row the same bits at every batch, but for a row alone in fp32 and in some bf16 shapes (so it
is padded to two), and but for bf16 on CPUs with AMX, where from 33 rows on it cuts the sum over inputs into pieces (so
there it gets 32 rows at a time). Knows nothing of the model.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.loader import count_fallback, on_triton

AMX_ROWS = 32
"""The most rows for which oneDNN's AMX product adds up a row's products in one order."""


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in], weight [out, in], bias [out] -> [..., out]."""
    return F.linear(x, weight, bias)


def _pack(weight: Tensor) -> Tensor | str:
    """The weight in oneDNN's layout, or why it cannot be had."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.bfloat16, torch.float32):
        return f"no packed form of {weight.dtype} on {weight.device.type}"
    if not torch.backends.mkldnn.is_available():
        return "this torch has no oneDNN"
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "oneDNN has no bf16 on this CPU"
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        return packed
    except (RuntimeError, AttributeError) as error:
        return f"packing failed: {str(error).splitlines()[0]}"


class PackedLinear:
    """y = x @ weight.T + bias, prepacked. Keeps no unpacked copy of the weight unless asked.

    weight: [out, in] bf16 or fp32; bias: [out] in the same dtype, or None. What cannot be packed, or does not agree
    with F.linear on a probe, runs through F.linear: logged once and counted under "linear".
    On a GPU nothing is packed (fp16 too): F.linear, or with `deterministic` the Triton kernel of fixed tiles.
    """

    __slots__ = ("_fixed_tiles", "_max_rows", "_packed", "bias", "in_features", "is_packed", "out_features", "weight")

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, keep_weight: bool = False, deterministic: bool = False
    ) -> None:
        self.out_features, self.in_features = weight.shape
        weight = weight.detach()
        self.bias = None if bias is None else bias.detach()
        amx = weight.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
        self._max_rows = AMX_ROWS if amx else None
        triton = on_triton(weight)
        self._fixed_tiles = triton and deterministic
        packed = None if triton else _pack(weight)
        why = packed if isinstance(packed, str) else None
        self._packed: Tensor | None = None if isinstance(packed, str) else packed
        if self._packed is not None and not self._agrees(weight):
            self._packed, why = None, "the packed product differs from F.linear"
        if why is not None:
            count_fallback("linear", why)
        self.is_packed = self._packed is not None
        self.weight = weight if keep_weight or not self.is_packed else None

    def _agrees(self, weight: Tensor) -> bool:
        """Compares with F.linear on four fixed rows, within the rounding of the dtype."""
        probe = torch.linspace(-1, 1, 4 * self.in_features).view(4, -1).sin().to(weight.dtype)
        want, got = F.linear(probe, weight, self.bias).float(), self(probe).float()
        tolerance = 2e-2 if weight.dtype == torch.bfloat16 else 1e-4
        return bool((got - want).abs().max() <= tolerance * (want.abs().max() + 1e-6))

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., in] in the weight's dtype -> [..., out]."""
        if self._packed is None:
            assert self.weight is not None
            if self._fixed_tiles:
                from kernels.gpu.linear import linear

                return linear(x, self.weight, self.bias)
            return F.linear(x, self.weight, self.bias)
        rows = x.reshape(-1, self.in_features)
        if rows.shape[0] == 0:
            return x.new_empty((*x.shape[:-1], self.out_features))
        if self._max_rows is None or rows.shape[0] <= self._max_rows:
            out = self._product(rows, self._packed)
        else:
            out = torch.cat([self._product(part, self._packed) for part in rows.split(self._max_rows)])
        return out.view(*x.shape[:-1], self.out_features)

    def _product(self, rows: Tensor, packed: Tensor) -> Tensor:
        """rows [n, in] -> [n, out]; a row alone is computed twice."""
        alone = rows.shape[0] == 1
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            torch.cat((rows, rows)) if alone else rows, packed, self.bias, "none", [], ""
        )
        return out[:1] if alone else out
