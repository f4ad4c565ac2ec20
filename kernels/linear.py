"""Linear layers whose weights are packed once. On a GPU, they use cuBLAS, or Triton if rows must not depend on each
other.

On a CPU, a row's bits do not depend on the other rows, except if F.linear must be used ("torch");
tests/kernels/test_linear.py checks this. For weights of 4 or 8 bits, our own SIMD product ("int4", "int8") is used. The
providers for other weights are:
* "amx": ours, for bf16 on Intel's AMX tiles. (With 33 rows or more, oneDNN's AMX product splits the sum over inputs.)
* "simd": ours, in SIMD vectors.
* "onednn": oneDNN. In measurements, it gives a row the same bits in every batch of two or more. A single row (fp32,
  some bf16 shapes) has different bits, so it is padded to two.
Our product is used unless oneDNN's is faster by a margin (`SLOWER`). A process times both once for each dtype and
build. An argument or the environment variable KERNELS_LINEAR requests a provider; KERNELS_CHOICES names a directory in
which processes agree on a provider.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu import amx, huge_pages, linear_int
from kernels.cpu import linear as simd
from kernels.cpu.loader import current, on_triton
from kernels.cpu.selection import Isa, count_fallback
from kernels.environment import choices_directory, linear_provider
from kernels.quantization import QuantizedWeight

_LOG = logging.getLogger("looseleaf.kernels")
Provider = Literal["amx", "onednn", "simd", "torch"]
Product = Callable[[Tensor], Tensor]
"""A function from x [rows, in], with at least one row, to [rows, out]."""
Packed = tuple[Tensor, Product]
ONEDNN_AMX_ROWS = 32
"""Largest number of rows up to which oneDNN's AMX product sums a row in the same order for any number of rows."""
PROBED = 256
"""Approximate number of outputs compared with torch's before a packed product is trusted."""
TIMED_SHAPE, TIMED_ROWS = (3072, 768), (1, 32)
"""Outputs and inputs, and numbers of rows, of the products timed to choose a provider."""
TIMED_REPEATS = 7
SLOWER = 1.25
"""oneDNN's product is chosen if ours takes more than this many times as long.

There is a margin because our products allow a pass in one call (`engine.models.fused`), and because workers that
measure separately should make the same choice in spite of noise.
"""


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns x @ weight.T + bias, computed by torch. x is [..., in], weight is [out, in], and bias is [out]."""
    return F.linear(x, weight, bias)


def asked_for() -> Provider | None:
    """Returns the provider that the environment requests, or None. Raises ValueError if its name is unknown."""
    name = linear_provider()
    if name not in (None, *get_args(Provider)):
        raise ValueError(f"KERNELS_LINEAR is {name!r}, but must be one of {', '.join(get_args(Provider))}")
    return name  # type: ignore[return-value]


def _last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _on_amx(weight: Tensor, bias: Tensor | None) -> Packed | str:
    """Packs a weight for our product on AMX tiles, or returns the reason why the product is not available."""
    if weight.dtype != torch.bfloat16 or not amx.available():
        return f"no AMX tiles for {weight.dtype} on this CPU"
    n_out, n_in = weight.shape
    if n_in % amx.DEPTH:
        why = f"AMX needs a number of inputs that is a multiple of {amx.DEPTH}, not {n_in}"
        count_fallback("linear", why, "on the next best provider")
        return why
    packed = amx.pack(weight)
    return packed, lambda x: amx.linear(_last_contiguous(x), packed, bias, n_out)


def _on_simd(weight: Tensor, bias: Tensor | None) -> Packed | str:
    """Packs a weight for our product in vectors, or returns the reason why the product is not available."""
    entry, n_out = simd.entry(), weight.shape[0]
    if entry is None or weight.dtype not in (torch.bfloat16, torch.float32):
        return f"no C++ kernels for {weight.dtype} are in use"
    packed = simd.pack(weight)
    return packed, lambda x: simd.linear(entry, _last_contiguous(x), packed, bias, n_out)


def _on_onednn(weight: Tensor, bias: Tensor | None) -> Packed | str:
    """Packs a weight in oneDNN's own layout for its product, or returns the reason why the product is not available."""
    if weight.dtype not in (torch.bfloat16, torch.float32):
        return f"no packed form of {weight.dtype}"
    if not torch.backends.mkldnn.is_available():
        return "this torch has no oneDNN"
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "oneDNN has no bf16 on this CPU"
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
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
    return packed, by_parts if in_pieces else product


_PACKED: dict[Provider, Callable[[Tensor, Tensor | None], Packed | str]] = {
    "amx": _on_amx,
    "simd": _on_simd,
    "onednn": _on_onednn,
}
"""The CPU providers, ours first."""


@functools.cache
def _preferred(dtype: torch.dtype, isa: Isa) -> tuple[Provider, ...]:
    """Returns the providers in the order in which to try them. The measured or agreed choice comes first."""
    weight = torch.randn(TIMED_SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype)
    tried = {name: pack(weight, None) for name, pack in _PACKED.items()}
    found = {name: packed[1] for name, packed in tried.items() if not isinstance(packed, str)}
    ours = next((name for name in found if name != "onednn"), None)
    if ours is None or "onednn" not in found:
        return tuple(_PACKED)
    own_s, onednn_s = times_of([found[ours], found["onednn"]], dtype)
    measured: Provider = "onednn" if own_s > SLOWER * onednn_s else ours
    chosen = agreed(f"linear-{str(dtype).removeprefix('torch.')}-{isa}", measured, list(found))
    _LOG.info(
        "linear layers of %s run on %s: 1 and %d rows of %s took %.0f us on %s and %.0f us on onednn (%s kernels)%s",
        dtype, chosen, TIMED_ROWS[1], TIMED_SHAPE, own_s * 1e6, ours, onednn_s * 1e6, isa,
        "" if chosen == measured else "; chosen by another worker",
    )  # fmt: skip
    return (chosen, *(name for name in _PACKED if name != chosen))


def agreed(name: str, choice: Provider, possible: list[Provider]) -> Provider:
    """Returns the choice of the first process among those with the same directory in KERNELS_CHOICES, because workers
    with different providers cannot share blocks. Returns `choice` if there is no directory, or if the first choice
    cannot be read or is not in `possible`.
    """
    if (directory := choices_directory()) is None:
        return choice
    path = Path(directory) / name
    try:
        with tempfile.NamedTemporaryFile("w", dir=directory) as mine:
            mine.write(choice)
            mine.flush()
            with contextlib.suppress(FileExistsError):
                os.link(mine.name, path)  # never replaces a file; the file appears complete
        first = path.read_text()
    except OSError as error:
        count_fallback("linear choice", f"{path}: {error.strerror}", "as measured by this process alone")
        return choice
    return next((provider for provider in possible if provider == first), choice)


def times_of(products: list[Product], dtype: torch.dtype) -> list[float]:
    """Returns the duration of each product in seconds, summed over TIMED_ROWS. A duration is the shortest of several
    interleaved measurements, because other load on the machine only adds time. Uses one thread, because another worker
    may be measuring on another core.
    """
    inputs = [torch.ones(rows, TIMED_SHAPE[1], dtype=dtype) for rows in TIMED_ROWS]
    best = [[float("inf")] * len(inputs) for _ in products]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(TIMED_REPEATS):
            for of_product, product in zip(best, products, strict=True):
                for i, x in enumerate(inputs):
                    start = time.perf_counter()
                    product(x)
                    of_product[i] = min(of_product[i], time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return [sum(of_product) for of_product in best]


class PackedLinear:
    """A prepacked linear layer, y = x @ weight.T + bias.

    weight: [out, in] bf16 or fp32; bias: [out] in the same dtype, or None. If no provider can pack the weight so that
        its product agrees with F.linear on a probe, F.linear is used; this is logged once and counted under "linear".
        On a GPU nothing is packed, and fp16 is allowed: F.linear is used or, with `deterministic`, the Triton kernel,
        whose rows do not depend on each other.
        QuantizedWeights, in the order of their outputs, need `dtype`, the dtype of inputs and outputs. If our product
        for them is not available (a GPU, a build without C++ kernels), they run as a matrix of `dtype`. This is logged
        once and counted.
    keep_weight: also keeps the unpacked weight.
    provider: the provider to use on a CPU; None: the one that the environment requests, or else the one that is chosen
        by measurement.
    """

    __slots__ = ("_product", "bias", "how", "in_features", "out_features", "packed", "site", "weight")

    def __init__(
        self,
        weight: Tensor | Sequence[QuantizedWeight],
        bias: Tensor | None = None,
        *,
        keep_weight: bool = False,
        deterministic: bool = False,
        provider: Provider | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.bias = None if bias is None else bias.detach().contiguous()
        self.site: int | None = None
        """Number of this layer's site for LoRA adapters (`kernels.lora`); None if adapters do not correct it."""
        self.how: Provider | Literal["triton", "int4", "int8"]
        self.packed: Tensor | None
        if not isinstance(weight, Tensor):
            assert dtype is not None
            self.out_features, self.in_features = sum(part.shape[0] for part in weight), weight[0].shape[1]
            if (found := linear_int.packed_product(weight, self.bias, dtype)) is not None:
                self.how = "int4" if any(part.bits == 4 for part in weight) else "int8"
                self.packed, self._product = found
                self.weight = None
                return
            weight = torch.cat([part.dequantized(dtype) for part in weight])
        self.out_features, self.in_features = weight.shape
        weight = weight.detach()
        if on_triton(weight):
            self.how, self.packed, self._product = _on_gpu(weight, self.bias, deterministic)
        else:
            self.how, self.packed, self._product = _on_cpu(weight, self.bias, provider or asked_for())
        self.weight = weight if keep_weight or not self.is_packed else None

    @property
    def is_packed(self) -> bool:
        return self.packed is not None

    def __call__(self, x: Tensor) -> Tensor:
        """Maps x [..., in], in the weight's dtype, to [..., out]."""
        rows = x.reshape(-1, self.in_features)
        if rows.shape[0] == 0:
            return x.new_empty((*x.shape[:-1], self.out_features))
        return self._product(rows).view(*x.shape[:-1], self.out_features)


def provider_of(dtype: torch.dtype) -> str:
    """Returns the provider of CPU linear layers whose numbers of inputs and outputs are multiples of 32. The bits of
    their results depend on the provider.
    """
    return PackedLinear(torch.zeros(32, 32, dtype=dtype)).how


def _on_gpu(
    weight: Tensor, bias: Tensor | None, deterministic: bool
) -> tuple[Literal["torch", "triton"], None, Product]:
    if not deterministic:
        return "torch", None, lambda x: linear_reference(x, weight, bias)
    from kernels.gpu.linear import compile_tiles, linear

    compile_tiles(weight, bias)
    return "triton", None, lambda x: linear(x, weight, bias)


def _on_cpu(weight: Tensor, bias: Tensor | None, provider: Provider | None) -> tuple[Provider, Tensor | None, Product]:
    why = ""
    for name in (provider,) if provider is not None else _preferred(weight.dtype, current().isa):
        if name == "torch":
            break
        found = _PACKED[name](weight.contiguous(), bias)
        if isinstance(found, str):
            why = found
        elif _agrees(found[1], weight, bias):
            huge_pages.move(found[0])
            return name, *found
        else:
            why = f"the product of {name!r} differs from F.linear"
            count_fallback("linear", why, "on the next best provider")
    if provider != "torch":
        count_fallback("linear", why)
    return "torch", None, lambda x: linear_reference(x, weight, bias)


def _agrees(product: Product, weight: Tensor, bias: Tensor | None) -> bool:
    """Returns whether a product agrees with F.linear in fp32, within rounding. Compares about PROBED outputs for four
    rows.
    """
    probe = torch.linspace(-1, 1, 4 * weight.shape[1]).view(4, -1).sin().to(weight.dtype)
    some = torch.arange(weight.shape[0] - 1, -1, -max(1, weight.shape[0] // PROBED))
    want = linear_reference(probe.float(), weight[some].float(), None if bias is None else bias[some].float())
    tolerance = 2e-2 if weight.dtype == torch.bfloat16 else 1e-4
    return bool((product(probe).float()[:, some] - want).abs().max() <= tolerance * (want.abs().max() + 1e-6))
