"""Weights of a model of transformers whose products `PackedLinear` computes.

Model definitions in transformers multiply in several ways: with `nn.Linear`, with `Conv1D`, with one expert from a
stack of matrices, or with a router's bare parameter. torch passes operations on a tensor subclass to its
`__torch_function__`, which recognizes these products. With torch's own product, a row's bits could depend on its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.errors import UnsupportedModel
from kernels.linear import PackedLinear
from kernels.quantization import Bits, QuantizedWeight, quantize

NOT_ROUNDED = ("gate.weight", "router.weight")
"""Endings of the names of routers' weights, which are not rounded: they are small, and a small error in them could
select different experts.
"""

_CASTS = {Tensor.to, Tensor.type, Tensor.float, Tensor.bfloat16, Tensor.half}
_TRANSPOSES = {Tensor.t, torch.t, Tensor.T.__get__, Tensor.mT.__get__}  # type: ignore[attr-defined]
_PROPERTIES = {
    Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__, Tensor.ndim.__get__,  # type: ignore[attr-defined]
    Tensor.requires_grad.__get__, Tensor.is_cuda.__get__, Tensor.layout.__get__,  # type: ignore[attr-defined]
    Tensor.is_quantized.__get__, Tensor.is_meta.__get__,  # type: ignore[attr-defined]
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__, Tensor.element_size,
}  # fmt: skip


class _Matrices:
    """The values of a weight, which its views share. The first product of each kind packs the raw values."""

    def __init__(self, raw: Tensor, name: str, deterministic: bool, bits: Bits | None) -> None:
        self.name = name
        self.bits = bits
        self.raw: Tensor | None = raw
        self.deterministic = deterministic
        self.packed: dict[tuple[torch.dtype, bool], list[PackedLinear]] = {}
        self.is_plain = False
        """Whether the raw values are kept, because an operation other than a product has used them."""

    def product(self, dtype: torch.dtype, outputs_first: bool, index: int) -> PackedLinear:
        """Returns the linear layer of matrix `index`. `outputs_first` says whether the raw matrices are [out, in]. The
        first call for a dtype and an order packs the whole stack, so that no request has to wait for it later. Raises
        UnsupportedModel if the raw values have been freed before the first call.
        """
        key = (dtype, outputs_first)
        if key not in self.packed:
            if self.raw is None:
                raise UnsupportedModel(f"tensor {self.name} is used in a way that did not occur at startup")
            stack = self.raw if self.raw.dim() == 3 else self.raw[None]
            self.packed[key] = [self._pack(matrix if outputs_first else matrix.T, dtype) for matrix in stack]
        return self.packed[key][index]

    def _pack(self, matrix: Tensor, dtype: torch.dtype) -> PackedLinear:
        weight: Tensor | list[QuantizedWeight] = matrix.to(dtype).contiguous()
        if self.bits is not None and not self.name.endswith(NOT_ROUNDED):
            weight = [quantize(matrix, self.bits)]
        return PackedLinear(weight, deterministic=self.deterministic, dtype=dtype)

    def plain(self) -> Tensor:
        if self.raw is None:
            raise UnsupportedModel(f"tensor {self.name} is used in a way that did not occur at startup")
        self.is_plain = True
        return self.raw

    def settle(self) -> None:
        """Frees the raw values if only products have used them. A new kind of use then raises UnsupportedModel."""
        if not self.is_plain:
            self.raw = None


class PackedWeight(Tensor):
    """A parameter [out, in] or [in, out], or a stack of such matrices, whose products `PackedLinear` computes. Other
    operations use the plain values.
    """

    matrices: _Matrices
    index: int | None
    """Index of the matrix within a stack; None for the whole stack."""
    outputs_first: bool
    """Whether the weight has the order of its raw values; False if the model's code has transposed it."""

    @staticmethod
    def __new__(
        cls, matrices: _Matrices, shape: Sequence[int], dtype: torch.dtype, device: torch.device,
        index: int | None = None, outputs_first: bool = True,
    ) -> Self:  # fmt: skip
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)  # type: ignore[attr-defined]
        self.matrices, self.index, self.outputs_first = matrices, index, outputs_first
        return self  # type: ignore[no-any-return]

    @classmethod
    def of(cls, raw: Tensor, name: str, deterministic: bool, bits: Bits | None) -> Self:
        """Returns a packed weight, which takes ownership of `raw`."""
        return cls(_Matrices(raw, name, deterministic, bits), raw.shape, raw.dtype, raw.device)

    def _like(self, shape: Sequence[int], **changes: Any) -> PackedWeight:
        found = {"index": self.index, "outputs_first": self.outputs_first, "dtype": self.dtype} | changes
        return PackedWeight(self.matrices, shape, found["dtype"], self.device, found["index"], found["outputs_first"])

    def times(self, x: Tensor, outputs_first: bool) -> Tensor:
        """Maps x [..., in] to [..., out]. The shape of this weight is [out, in] with `outputs_first`,
        and otherwise [in, out].
        """
        index = self.index or 0
        return self.matrices.product(self.dtype, outputs_first == self.outputs_first, index)(x)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _PROPERTIES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if (answer := _answer(func, args, kwargs)) is not None:
            return answer
        with torch._C.DisableTorchFunctionSubclass():
            return func(*map(_plain, args), **{name: _plain(value) for name, value in kwargs.items()})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise UnsupportedModel(f"{func} on a packed weight")


def _answer(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns the result of `func` if `func` is a product with a weight or with a view of a weight. Returns None
    otherwise.
    """
    if func is F.linear:
        x, weight, bias = _linear_arguments(*args, **kwargs)
        if _is_matrix(weight) and not isinstance(x, PackedWeight):
            return _plus(weight.times(x, True), bias)
    elif func in (torch.matmul, Tensor.matmul, Tensor.__matmul__) and _is_matrix(args[1]):
        return args[1].times(args[0], False)
    elif func in (torch.matmul, Tensor.matmul, Tensor.__matmul__) and _is_matrix(args[0]):
        return args[0].times(args[1].transpose(-1, -2), True).transpose(-1, -2)
    elif func is Tensor.__rmatmul__ and _is_matrix(args[0]):
        return args[0].times(args[1], False)
    elif func in (torch.addmm, Tensor.addmm) and len(args) == 3 and not kwargs and _is_matrix(args[2]):
        return _plus(args[2].times(args[1], False), args[0])
    elif func is Tensor.__getitem__ and isinstance(args[0], PackedWeight):
        return _expert(args[0], args[1])
    elif func in _TRANSPOSES and _is_matrix(args[0]):
        weight = args[0]
        return weight._like((weight.shape[1], weight.shape[0]), outputs_first=not weight.outputs_first)
    elif func in _CASTS and isinstance(args[0], PackedWeight):
        return _cast(func, args[0], args[1:], kwargs)
    return None


def _linear_arguments(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Any, Any, Tensor | None]:
    return input, weight, bias


def _plus(product: Tensor, bias: Tensor | None) -> Tensor:
    return product if bias is None else product + bias


def _is_matrix(value: object) -> bool:
    return isinstance(value, PackedWeight) and value.ndim == 2


def _expert(weight: PackedWeight, index: Any) -> PackedWeight | None:
    whole = weight.ndim == 3 and weight.index is None
    number = isinstance(index, int) or (isinstance(index, Tensor) and index.ndim == 0 and index.dtype != torch.bool)
    return weight._like(weight.shape[1:], index=int(index)) if whole and number else None


def _cast(
    func: Callable[..., Any], weight: PackedWeight, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> PackedWeight | None:
    named = {Tensor.float: torch.float32, Tensor.bfloat16: torch.bfloat16, Tensor.half: torch.float16}
    wanted = named.get(func) or next((a for a in (*args, kwargs.get("dtype")) if isinstance(a, torch.dtype)), None)
    return None if wanted is None else weight._like(weight.shape, dtype=wanted)


def _plain(value: Any) -> Any:
    """Returns a value in which packed weights are replaced with plain tensors."""
    if isinstance(value, PackedWeight):
        raw = value.matrices.plain()
        raw = raw if value.index is None else raw[value.index]
        return (raw if value.outputs_first else raw.T).to(value.dtype)
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value))
    return value


def pack(model: nn.Module, deterministic: bool, bits: Bits | None = None) -> list[_Matrices]:
    """Replaces the matrices and stacks of matrices of a model, except embeddings, with packed weights. Returns the
    values of the packed weights. Call `settle` on each value after every kind of use has occurred.
    """
    found = []
    for prefix, module, name, parameter in _matrices_of(model):
        weight = PackedWeight.of(parameter.detach(), f"{prefix}.{name}", deterministic, bits)
        del module._parameters[name]
        setattr(module, name, weight)
        found.append(weight.matrices)
    return found


def _matrices_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    for prefix, module in model.named_modules():
        if not isinstance(module, nn.Embedding):
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter.dim() in (2, 3):
                    yield prefix, module, name, parameter
