"""LoRA adapters of a loaded model. Tensors in PEFT's format are arranged for the packed linear layers that they
correct. An adapter is bound to one model. The packed linear layers inside a model's layers, except routers and experts,
are the model's *sites*, numbered in the order of loading.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from common.adapters import WEIGHTS_FILE, AdapterError, AdapterRef, LoraConfig, digest_of, read_config
from engine.errors import ModelError
from engine.quantized import Matrix
from engine.step import StepInput
from kernels.linear import PackedLinear
from kernels.lora import LoraPart, LoraRows, LoraWeights, lora

_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")


@dataclass(frozen=True, slots=True)
class Site:
    """A packed linear layer that adapters can correct, with its projections in the order of their outputs."""

    linear: PackedLinear
    parts: tuple[Matrix, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """The location of one of the model's projections, as a site and the projection's outputs within the site."""

    site: int
    at: int
    """The projection's first output within the site."""
    matrix: Matrix


class LoraAdapter:
    """An adapter that is loaded for one model."""

    __slots__ = ("digest", "weights")

    def __init__(self, digest: str, weights: LoraWeights) -> None:
        self.digest = digest
        self.weights = weights


class LoraStep:
    """The adapter of each token and of each requested row in one step."""

    __slots__ = ("of_rows", "of_tokens")

    def __init__(self, batch: StepInput) -> None:
        """Prepares the adapters of a step. At least one of the step's sequences must have an adapter."""
        used = list(dict.fromkeys(adapter for adapter in batch.adapters if adapter is not None))
        index = {adapter: number for number, adapter in enumerate(used)}
        of_sequence = np.array([-1 if a is None else index[a] for a in batch.adapters], np.int32)
        of_token = np.repeat(of_sequence, np.diff(batch.cu_seqlens_q))
        weights = [adapter.weights for adapter in used]
        self.of_tokens = LoraRows(weights, of_token)
        of_row = of_token[batch.logits_rows]
        same = np.array_equal(of_row, of_token)  # as in every decode step
        self.of_rows = self.of_tokens if same else LoraRows(weights, of_row)

    def correct(self, linear: PackedLinear, x: torch.Tensor, out: torch.Tensor, of_rows: bool) -> None:
        """Adds the adapters' corrections to `out`, the layer's output for x. The rows of x are the step's tokens or,
        with `of_rows`, the requested rows. Does nothing if `linear` is not a site.
        """
        if linear.site is not None:
            lora(x, out, self.of_rows if of_rows else self.of_tokens, linear.site)


class Settings(Protocol):
    """The interface of the settings that `LoraModel.of` reads."""

    @property
    def max_lora_rank(self) -> int: ...

    @property
    def deterministic(self) -> bool: ...


class LoraModel:
    """A loader of adapters for one model."""

    def __init__(self, sites: Sequence[Site], dtype: torch.dtype, device: torch.device, max_rank: int) -> None:
        self._sites = sites
        self._dtype = dtype
        self._device = device
        self._max_rank = max_rank
        self._places = _places(sites)

    @classmethod
    def of(cls, sites: Sequence[Site], kind: tuple[torch.dtype, torch.device], settings: Settings) -> Self:
        """Returns the LoraModel for a model with these `sites`. Raises ModelError if the model does not support
        adapters, or if `deterministic` is set on a GPU.
        """
        if not sites:
            raise ModelError("--enable-lora: models that run with transformers' definitions do not support adapters")
        if kind[1].type != "cpu" and settings.deterministic:
            raise ModelError("--enable-lora: on a GPU, rows with adapters depend on their batch; omit --deterministic")
        return cls(sites, *kind, settings.max_lora_rank)

    @property
    def max_adapter_bytes(self) -> int:
        """Size in bytes of an adapter of the maximum rank that corrects every projection."""
        width = sum(place.matrix.n_in + place.matrix.n_out for place in self._places.values())
        return width * self._max_rank * torch.empty((), dtype=self._dtype).element_size()

    def step_of(self, batch: StepInput) -> LoraStep | None:
        """Returns the adapters of a step, or None if no sequence has an adapter."""
        return LoraStep(batch) if batch.adapters else None

    def load(self, ref: AdapterRef) -> LoraAdapter:
        """Loads an adapter. Raises AdapterError if the adapter's files cannot be read, do not fit the model, exceed the
        maximum rank, or have changed.
        """
        config, path = read_config(ref.path), Path(ref.path) / WEIGHTS_FILE
        products: dict[int, list[LoraPart]] = defaultdict(list)
        try:
            with safe_open(path, framework="pt") as file:
                for module, names in _modules(path, file.keys()).items():
                    place, rank = self._place(path, module), self._rank(path, module, config)
                    a, b = (self._tensor(file.get_tensor(name), path, name) for name in names)
                    _check_shapes(path, module, (a, b), (rank, place.matrix))
                    a, b = (each.contiguous().to(self._device) for each in (a, b.T))
                    part = LoraPart(a, b, place.at, config.scale_of(module))
                    products[place.site].append(part)
        except (SafetensorError, OSError) as error:
            raise AdapterError(f"{path} is corrupt or cannot be read: {error}") from None
        if digest_of(ref.path) != ref.digest:
            raise AdapterError(f"{ref.path} has changed since adapter {ref.name!r} was added")
        return LoraAdapter(ref.digest, LoraWeights([products.get(site, ()) for site in range(len(self._sites))]))

    def _place(self, path: Path, module: str) -> Place:
        for name in (module, module.removeprefix("model.")):  # OPT checkpoints may lack the leading "model."
            if (place := self._places.get(name)) is not None:
                return place
        raise AdapterError(f"{path} adapts {module}, which is not a linear layer that this model can adapt")

    def _rank(self, path: Path, module: str, config: LoraConfig) -> int:
        if (rank := config.rank_of(module)) > self._max_rank:
            raise AdapterError(f"{path}: the rank of {module} is {rank}, and --max-lora-rank is {self._max_rank}")
        return rank

    def _tensor(self, tensor: torch.Tensor, path: Path, name: str) -> torch.Tensor:
        if tensor.dim() != 2 or not tensor.is_floating_point():
            raise AdapterError(f"{path}: tensor {name} must be a matrix of floats")
        return tensor.to(self._dtype)


def _places(sites: Sequence[Site]) -> dict[str, Place]:
    places: dict[str, Place] = {}
    for number, site in enumerate(sites):
        at = 0
        for part in site.parts:
            places[part.name] = Place(number, at, part)
            at += part.n_out
    return places


def _modules(path: Path, names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Returns the names of the tensors A and B of every adapted module. Raises AdapterError if there are other tensors
    or no tensors, or if a module lacks A or B.
    """
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for name in names:
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise AdapterError(f"{path}: tensor {name} is not supported; only lora_A and lora_B of linear layers are")
        found[match[1]][match[2]] = name
    if not found:
        raise AdapterError(f"{path} has no lora_A and lora_B")
    if incomplete := [module for module, pair in found.items() if len(pair) < 2]:
        raise AdapterError(f"{path}: {incomplete[0]} has only one of lora_A and lora_B")
    return {module: (pair["A"], pair["B"]) for module, pair in found.items()}


def _check_shapes(
    path: Path, module: str, found: tuple[torch.Tensor, torch.Tensor], wanted: tuple[int, Matrix]
) -> None:
    rank, matrix = wanted
    for letter, tensor, shape in zip("AB", found, ((rank, matrix.n_in), (matrix.n_out, rank)), strict=True):
        if tensor.shape != shape:
            got = list(tensor.shape)
            raise AdapterError(f"{path}: lora_{letter} of {module} has shape {got}, but must have {list(shape)}")
