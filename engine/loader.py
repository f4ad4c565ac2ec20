"""Loads the weights of a model by name and shape, from safetensors or GGUF files, or generates random weights. A model
takes the tensors that it needs, and `Weights.finish` then refuses a checkpoint with unexpected tensors.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from rich.console import Console
from rich.progress import Progress, TaskID
from safetensors import SafetensorError, safe_open

from common.digests import check_digests
from engine import quantized
from engine.checkpoint import WeightFile, weight_files
from engine.config import ModelConfig
from engine.dummy_weights import DummySource
from engine.errors import ModelError
from engine.gguf_file import GgufSource
from engine.lora import Site
from engine.quantized import Matrix, WeightFormat
from engine.ranks.shard import WHOLE, Shard
from engine.ranks.stage import ALL_LAYERS, Stage
from kernels.cpu.ranks import Ranks
from kernels.cpu.selection import count_fallback
from kernels.linear import PackedLinear
from kernels.quantization import Bits, QuantizedWeight, quantize
from kernels.row_parallel import RowParallelLinear, our_provider

LoadFormat = Literal["auto", "safetensors", "dummy"]
logger = logging.getLogger("engine")

IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "attn.masked_bias", "attn.bias")
"""Endings of the names of buffers that old checkpoints contain and no model needs."""


@dataclass(frozen=True, slots=True)
class Target:
    """The dtype, device and rounding of loaded weights, and the share of the model that is loaded."""

    dtype: torch.dtype
    """Data type of the computation."""
    device: torch.device
    deterministic: bool
    """Whether a row of a linear layer must not depend on its batch. This affects only the choice of GPU kernels."""
    bits: Bits | None = None
    """Number of bits to which matrices of floats are rounded; None if they are not rounded."""
    shard: Shard = WHOLE
    """The share of each layer that is loaded."""
    stage: Stage = ALL_LAYERS
    """The layers that are loaded."""
    ranks: Ranks | None = None
    """The connections to the ranks that share the model; None without tensor parallelism."""


class TensorSource(Protocol):
    """The interface of a source of tensors. `take` returns a tensor of the requested dtype on the device, possibly a
    view that is valid only as long as the source exists. `raw` returns a tensor as it is stored. `unused` returns the
    names of the tensors that have not been taken.
    """

    def has(self, name: str) -> bool: ...

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...

    def raw(self, name: str) -> torch.Tensor: ...

    def unused(self) -> list[str]: ...


class SafetensorsSource:
    """A source of tensors from safetensors files, which are memory-mapped or read directly into GPU memory."""

    def __init__(self, files: Sequence[WeightFile], device: torch.device) -> None:
        self._place = {name: file for file in files for name in file.tensors}
        self._unused = set(self._place)
        self._open = {file.path: self._map(file.path, device) for file in files}

    @staticmethod
    def _map(path: Path, device: torch.device) -> safe_open:
        try:
            return safe_open(path, framework="pt", device=str(device))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is corrupt ({error})") from error

    def has(self, name: str) -> bool:
        return name in self._place

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if name not in self._place:
            raise ModelError(f"the checkpoint lacks tensor {name}, shape {list(shape)}")
        file = self._place[name]
        found = file.tensors[name][1]
        if found != shape:
            raise ModelError(
                f"tensor {name} in {file.path} has shape {list(found)}, but the config requires {list(shape)}"
            )
        return self.raw(name).to(dtype)

    def raw(self, name: str) -> torch.Tensor:
        """Returns a tensor as it is stored. Raises ModelError if the checkpoint does not contain the tensor."""
        if name not in self._place:
            raise ModelError(f"the checkpoint lacks tensor {name}")
        self._unused.discard(name)
        tensor: torch.Tensor = self._open[self._place[name].path].get_tensor(name)  # type: ignore[no-untyped-call]
        return tensor

    def unused(self) -> list[str]:
        ignored = (*IGNORED_SUFFIXES, *quantized.IGNORED_SUFFIXES)
        return sorted(name for name in self._unused if not name.endswith(ignored))


class Weights:
    """A loader of a model's parameters, which fuses and packs linear layers."""

    def __init__(
        self,
        source: TensorSource,
        target: Target,
        weight_format: WeightFormat | None = None,
        progress: Progress | None = None,
        task: TaskID = TaskID(0),  # noqa: B008
    ) -> None:
        self.device, self.dtype = target.device, target.dtype
        self.shard, self.stage = target.shard, target.stage
        self._target = target
        self._format = weight_format
        self.num_bytes = 0
        self.sites: list[Site] = []
        """The linear layers loaded so far that adapters can correct."""
        self._source = source
        self._progress = progress
        self._task = task

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """Returns a copy of a parameter, because its file may later change or be removed."""
        found = self._source.take(name, shape, self.dtype)
        return self._count(torch.empty(shape, dtype=self.dtype, device=self.device).copy_(found))

    def linear(
        self, names: Sequence[str], outs: Sequence[int], size_in: int, *, bias: bool = False, is_router: bool = False
    ) -> PackedLinear:
        """Returns the projections `names`, each [out, size_in], as one layer with their outputs in order. The router of
        a mixture of experts is not rounded, because it is small, and a small error in it could select different
        experts.
        """
        parts = [Matrix(name, out, size_in) for name, out in zip(names, outs, strict=True)]
        biases = [self._source.take(f"{part.name}.bias", (part.n_out,), self.dtype) for part in parts] if bias else []
        weight = self._weight(parts, rounded=not is_router)
        packed = self._packed(weight, self._count(torch.cat(biases)) if bias else None)
        if ".layers." in names[0] and ".experts." not in names[0] and not is_router:
            packed.site = len(self.sites)
            self.sites.append(Site(packed, tuple(parts)))
        return packed

    def columns(
        self, names: Sequence[str], outs: Sequence[Sequence[int]], size_in: int, *, bias: bool = False
    ) -> PackedLinear:
        """Returns this rank's share of the outputs of the projections `names`, as one layer. `outs` lists, for each
        projection, the sizes of its parts (such as q, k and v). The rank takes its share of each part.
        """
        sizes = [sum(each) for each in outs]
        if self.shard.is_whole:
            return self.linear(names, sizes, size_in, bias=bias)
        rows = [self._rows_of_rank(each) for each in outs]
        weight = self._cut([f"{name}.weight" for name in names], [(size, size_in) for size in sizes], rows)
        added = self._cut([f"{name}.bias" for name in names], [(size,) for size in sizes], rows) if bias else None
        return self._of_rank(weight, added)

    def rows(self, name: str, size_out: int, size_in: int, *, bias: bool = False) -> PackedLinear | RowParallelLinear:
        """Returns the part of the projection `name` that multiplies this rank's share of the inputs."""
        if self.shard.is_whole:
            return self.linear([name], [size_out], size_in, bias=bias)
        dtype, span = self.dtype, self.shard.span(size_in)
        weight = self._count(self._source.take(f"{name}.weight", (size_out, size_in), dtype)[:, span])
        added = self._source.take(f"{name}.bias", (size_out,), dtype).clone() if bias else None
        return RowParallelLinear(weight, added, self.shard.own_parts, self._target.ranks)

    def _rows_of_rank(self, sizes: Sequence[int]) -> list[slice]:
        """Returns this rank's rows of a matrix that consists of parts of these sizes, stacked vertically."""
        starts = itertools.accumulate(sizes, initial=0)
        spans = [(start, self.shard.span(size)) for start, size in zip(starts, sizes, strict=False)]
        return [slice(start + span.start, start + span.stop) for start, span in spans]

    def _cut(
        self, names: Sequence[str], shapes: Sequence[tuple[int, ...]], rows: Sequence[Sequence[slice]]
    ) -> torch.Tensor:
        """Returns a copy of the given rows of each tensor, stacked vertically."""
        found = [self._source.take(name, shape, self.dtype) for name, shape in zip(names, shapes, strict=True)]
        return self._count(torch.cat([tensor[at] for tensor, each in zip(found, rows, strict=True) for at in each]))

    def _of_rank(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        return PackedLinear(weight, bias, provider=our_provider(weight.dtype, weight.shape[1]))

    def pack(self, weight: torch.Tensor, *, is_kept: bool = True) -> PackedLinear:
        """Returns a linear layer of a weight whose bytes have been counted. If packing copies the weight and the caller
        keeps the original (`is_kept`), the bytes of the copy are also counted.
        """
        if self.shard.is_whole:
            packed = self._packed(self._rounded(weight))
        else:
            packed = self._of_rank(self._count(weight := weight[self.shard.span(len(weight))]))
        if not (packed.is_packed and is_kept):
            self.num_bytes -= weight.numel() * weight.element_size()
        return packed

    def _packed(self, weight: torch.Tensor | list[QuantizedWeight], bias: torch.Tensor | None = None) -> PackedLinear:
        if isinstance(weight, torch.Tensor):
            self._count(weight)
        else:
            self.num_bytes += sum(part.num_bytes for part in weight)
        return PackedLinear(weight, bias, deterministic=self._target.deterministic, dtype=self.dtype)

    def _weight(self, parts: Sequence[Matrix], *, rounded: bool) -> torch.Tensor | list[QuantizedWeight]:
        """Returns the weight of a layer that consists of these matrices: quantized weights if all matrices are
        quantized or the layer is rounded, and otherwise one matrix of floats.
        """
        found = [self._matrix(part) for part in parts]
        quantized = [weight for weight in found if isinstance(weight, QuantizedWeight)]
        if len(quantized) == len(found):
            return quantized
        if quantized:
            count_fallback("quantized linear", f"only some parts of fused {parts[0].name} are quantized", "dequantized")
        dtype = self.dtype
        floats = [weight.dequantized(dtype) if isinstance(weight, QuantizedWeight) else weight for weight in found]
        return self._rounded(torch.cat(floats)) if rounded else torch.cat(floats)

    def _matrix(self, matrix: Matrix) -> torch.Tensor | QuantizedWeight:
        dtype = self.dtype
        stored = self._format.read(self._source, matrix) if self._format is not None else None
        if stored is None:
            return self._source.take(f"{matrix.name}.weight", (matrix.n_out, matrix.n_in), dtype)
        if isinstance(stored, torch.Tensor):
            return stored.to(dtype).to(self.device)
        return stored if self.device.type == "cpu" else stored.to(self.device)

    def _rounded(self, weight: torch.Tensor) -> torch.Tensor | list[QuantizedWeight]:
        """Returns a matrix rounded to the target's number of bits, or unchanged if the target has none."""
        return weight if self._target.bits is None else [quantize(weight, self._target.bits)]

    def finish(self, allowed: Sequence[str] = (), elsewhere: tuple[str, ...] = ()) -> None:
        """Raises ModelError if the checkpoint has tensors that were not used and are not in `allowed`. Names that start
        with an entry of `elsewhere` belong to other stages.
        """
        unused = (name for name in self._source.unused() if name not in allowed)
        extra = [name for name in unused if not name.startswith(elsewhere)]
        if extra:
            raise ModelError(f"the checkpoint has unexpected tensor {extra[0]} ({len(extra)} in all)")

    def layer_done(self) -> None:
        if self._progress is not None:
            self._progress.advance(self._task)

    def _count(self, tensor: torch.Tensor) -> torch.Tensor:
        self.num_bytes += tensor.numel() * tensor.element_size()
        return tensor


def _kind(load_format: LoadFormat, files: Sequence[WeightFile]) -> str:
    return "dummy" if load_format == "dummy" else "GGUF" if files[0].path.suffix == ".gguf" else "safetensors"


@contextlib.contextmanager
def open_weights(
    directory: Path, config: ModelConfig, target: Target, load_format: LoadFormat, seed: int
) -> Iterator[Weights]:
    """A context manager that yields the weights of a model directory. Shows a progress bar if stderr is a terminal.

    Raises ModelError if a weight file is missing or corrupt, and StartupError if a file does not match SHA256SUMS.
    """
    source: TensorSource
    files: list[WeightFile] = []
    if load_format == "dummy":
        source = DummySource(seed, target)
    else:
        files = weight_files(directory)
        is_gguf = files[0].path.suffix == ".gguf"
        source = GgufSource(files[0], target.device) if is_gguf else SafetensorsSource(files, target.device)
    check_digests(directory, ["config.json", "generation_config.json", *(file.path.name for file in files)])
    logger.info("loading %s weights of %s", _kind(load_format, files), directory)
    with contextlib.ExitStack() as stack:
        progress: Progress | None = None
        task = TaskID(0)
        if sys.stderr.isatty():
            progress = stack.enter_context(Progress(console=Console(stderr=True), transient=True))
            task = progress.add_task("loading layers", total=config.num_layers)
        weights = Weights(source, target, config.weight_format, progress, task)
        yield weights
    logger.info("loaded %.2f GiB of weights", weights.num_bytes / 2**30)
