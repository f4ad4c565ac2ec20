"""What the engine asks of attention, on any provider: the interface of a provider and what it is told.

Independent of providers (see `kernels.providers.choice`), layers and sequences.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class Unavailable(ValueError):
    """A provider that is not available here or does not support the model; one sentence that says why."""


def cannot_load(provider: str, what: str, error: Exception) -> Unavailable:
    reason = (str(error) or repr(error)).splitlines()[0]
    return Unavailable(f"attention provider {provider} cannot load {what}: {reason}")


def import_for(provider: str, module: str, otherwise: str = "") -> Any:
    """A module that may not be installed, or that was built for another torch or CUDA. Raises Unavailable."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise cannot_load(provider, module, error) from error
        raise Unavailable(f"attention provider {provider} needs the module {module}{otherwise}") from error
    except (ImportError, OSError, RuntimeError) as error:
        raise cannot_load(provider, module, error) from error


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """A model's attention on one device: all that a provider may refuse or prepare for. Lengths in tokens."""

    device: torch.device
    compute_capability: tuple[int, int] | None
    """Of an NVIDIA GPU, (9, 0) for Hopper; None on a CPU."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    """Of queries and outputs."""
    kv_dtype: torch.dtype
    softmax_scale: float
    window: int | None
    """A query at position p sees keys p - window + 1 .. p; None: all keys up to p."""
    max_model_len: int
    deterministic: bool
    """A row's bits may depend on its own query, keys and values only (docs/design.md, Numbers)."""
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap) before the softmax; None: they stay."""
    sinks: Tensor | None = None
    """fp32 [num_heads]: one more logit a head that takes part in the softmax and has no value; None: none."""

    @property
    def extras(self) -> str | None:
        """What is asked for beyond plain attention, by name; None: nothing."""
        found = [name for name in ("softcap", "sinks") if getattr(self, name) is not None]
        return " and ".join(found) or None


@dataclass(frozen=True, slots=True)
class HostBatch:
    """The same three arrays as a batch's tensors, in host memory, for providers that plan there."""

    cu_seqlens_q: npt.NDArray[np.int32]
    context_lens: npt.NDArray[np.int32]
    block_table: npt.NDArray[np.int32]


@dataclass(slots=True)
class AttentionBatch:
    """What attention knows of a step, the same for all its layers: B sequences of one KV group."""

    cu_seqlens_q: Tensor  # int32 [B + 1]
    context_lens: Tensor  # int32 [B], this step's tokens included; 0: a row of padding
    block_table: Tensor  # int32 [B, max_blocks]
    host: HostBatch
    decode_only: bool
    """Every sequence has one query."""
    is_static: bool = False
    """The tensors lie where a CUDA graph was captured or is about to be, the largest batch first: their addresses and
    shapes come again, and what `prepare` makes for them must lie at the same address every time, too."""
    max_q_len: int = field(init=False)
    """The most queries of a sequence."""
    max_context_len: int = field(init=False)

    def __post_init__(self) -> None:
        self.max_q_len = 1 if self.decode_only else int(np.diff(self.host.cu_seqlens_q).max(initial=0))
        self.max_context_len = int(self.host.context_lens.max(initial=0))


class AttentionProvider(Protocol):
    """Attention over block tables. One object serves one runner (one stream): `prepare` may keep what layers share.

    `decode` and `prefill` have the contracts of `kernels.paged_attention` and `kernels.paged_prefill`: queries
    [T, num_heads, head_dim] -> the same shape, caches [num_blocks, num_kv_heads, block_size, head_dim], strided.
    """

    name: str
    version: str
    """Names the code that decides the bits; part of the numerics fingerprint, so no spaces."""
    deterministic: bool
    """Whether results keep what `AttentionSpec.deterministic` asks for."""
    capturable: bool
    """Whether `decode` can be captured in a CUDA graph."""

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        """None, or why this provider cannot serve such a model, as the end of a sentence."""
        ...

    def prepare(self, batch: AttentionBatch) -> None:
        """Once a step, on the step's stream, before its layers, outside of any graph."""
        ...

    def decode(self, q: Tensor, keys: Tensor, values: Tensor, batch: AttentionBatch) -> Tensor: ...

    def prefill(self, q: Tensor, keys: Tensor, values: Tensor, batch: AttentionBatch) -> Tensor: ...


SPLIT_QUERIES = 256
"""Steps of more queries should not split keys: they fill a GPU without, and partial results take memory by queries."""
HALF_TYPES = (torch.bfloat16, torch.float16)


def flash_window(window: int | None) -> tuple[int, int]:
    """(left, right) as flash-attn counts them, beside the query itself; -1 is without end."""
    return (-1, -1) if window is None else (window - 1, 0)


def flash_objection(spec: AttentionSpec) -> str | None:
    """What no flash-attn kernel takes: the reason, or None."""
    if spec.extras:
        return f"is not asked for {spec.extras} yet"
    if spec.dtype not in HALF_TYPES:
        return f"takes bfloat16 and float16, not {_name(spec.dtype)}"
    if spec.kv_dtype != spec.dtype:
        return f"needs keys and values in the queries' {_name(spec.dtype)}, not {_name(spec.kv_dtype)}"
    if spec.head_dim % 8 or spec.head_dim > 256:
        return f"takes head dimensions that are multiples of 8 up to 256, not {spec.head_dim}"
    return None


def slots_first(cache: Tensor) -> Tensor:
    """[num_blocks, kv_heads, block_size, head_dim] -> a view [num_blocks, block_size, kv_heads, head_dim]."""
    return cache.transpose(1, 2)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
