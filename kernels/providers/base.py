"""The interface between the engine and attention providers, and the data that providers receive."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class Unavailable(ValueError):
    """The error for a provider that is not available or does not support the model. The message is one sentence."""


def cannot_load(provider: str, what: str, error: Exception) -> Unavailable:
    reason = (str(error) or repr(error)).splitlines()[0]
    return Unavailable(f"attention provider {provider} cannot load {what}: {reason}")


def import_for(provider: str, module: str, otherwise: str = "") -> Any:
    """Imports a provider's module. Raises Unavailable if it is not installed or does not fit this torch or CUDA."""
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
    """The properties of a model's attention on one device. Lengths are in tokens."""

    device: torch.device
    compute_capability: tuple[int, int] | None
    """Compute capability of an NVIDIA GPU, (9, 0) for Hopper; None on a CPU."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    """Dtype of queries and outputs."""
    kv_dtype: torch.dtype
    softmax_scale: float
    window: int | None
    """Sliding window: a query at position p sees keys p - window + 1 .. p; None: all keys up to p."""
    max_model_len: int
    deterministic: bool
    """Whether a row's bits must depend only on its own query, keys and values (docs/design.md, Numbers)."""
    softcap: float | None = None
    """If given, scores become softcap * tanh(score / softcap) before the softmax."""
    sinks: Tensor | None = None
    """If given, fp32 [num_heads]: one more logit for each head in the softmax, without a value."""

    @property
    def extras(self) -> str | None:
        """The names of the extra features that the model's attention needs, or None if it needs none."""
        found = [name for name in ("softcap", "sinks") if getattr(self, name) is not None]
        return " and ".join(found) or None


@dataclass(frozen=True, slots=True)
class HostBatch:
    """Host copies of a batch's three tensors, for providers that plan on the host."""

    cu_seqlens_q: npt.NDArray[np.int32]
    context_lens: npt.NDArray[np.int32]
    block_table: npt.NDArray[np.int32]


@dataclass(slots=True)
class AttentionBatch:
    """The data of a step for attention, for B sequences. All layers of a KV group share the data."""

    cu_seqlens_q: Tensor  # int32 [B + 1]
    context_lens: Tensor  # int32 [B], including this step's tokens; 0: a padding row
    block_table: Tensor  # int32 [B, max_blocks]
    host: HostBatch
    decode_only: bool
    """Whether every sequence has exactly one query."""
    is_static: bool = False
    """Whether a CUDA graph uses these tensors. Their addresses and shapes then recur, so the data that `prepare`
    creates must also keep its address. Graphs are captured for the largest batch first.
    """
    max_q_len: int = field(init=False)
    """Largest number of queries of a sequence."""
    max_context_len: int = field(init=False)

    def __post_init__(self) -> None:
        self.max_q_len = 1 if self.decode_only else int(np.diff(self.host.cu_seqlens_q).max(initial=0))
        self.max_context_len = int(self.host.context_lens.max(initial=0))


class AttentionProvider(Protocol):
    """The interface of an implementation of attention over block tables. An object serves one runner, or its layers
    with the same attention.

    `decode` and `prefill` have the contracts of `kernels.paged_attention` and `kernels.paged_prefill`: they map queries
    [T, num_heads, head_dim] to the same shape; caches are [num_blocks, num_kv_heads, block_size, row_width], strided.
    The provider "cpu" also takes keys that are stored by word (`kernels.kv_cache`).
    """

    name: str
    version: str
    """Version of the code that determines the bits. It is part of the numerics fingerprint, so it must not contain
    spaces.
    """
    deterministic: bool
    """Whether results satisfy `AttentionSpec.deterministic`."""
    capturable: bool
    """Whether `decode` can be captured in a CUDA graph."""

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        """Returns None if this provider supports a model with this spec. Otherwise returns the reason, phrased to
        follow the provider's name ("does not run on cuda").
        """
        ...

    def prepare(self, batch: AttentionBatch) -> None:
        """Prepares a step. Must be called once per step, on the step's stream, before its layers run and outside any
        graph.
        """
        ...

    def decode(self, q: Tensor, keys: Tensor, values: Tensor, batch: AttentionBatch) -> Tensor: ...

    def prefill(self, q: Tensor, keys: Tensor, values: Tensor, batch: AttentionBatch) -> Tensor: ...


SPLIT_QUERIES = 256
"""Maximum number of queries of a step for which keys should be split. Larger steps fill a GPU without splits, and the
memory for partial results grows with the number of queries.
"""
HALF_TYPES = (torch.bfloat16, torch.float16)


def flash_window(window: int | None) -> tuple[int, int]:
    """Returns flash-attn's (left, right) window sizes, which exclude the query itself. -1 means unlimited."""
    return (-1, -1) if window is None else (window - 1, 0)


def flash_objection(spec: AttentionSpec) -> str | None:
    """Returns the reason why flash-attn does not support the model, or None if it does."""
    if spec.extras:
        return f"does not support {spec.extras} yet"
    if spec.dtype not in HALF_TYPES:
        return f"takes bfloat16 and float16, not {type_name(spec.dtype)}"
    if spec.kv_dtype != spec.dtype:
        return f"needs keys and values in the queries' {type_name(spec.dtype)}, not {type_name(spec.kv_dtype)}"
    if spec.head_dim % 8 or spec.head_dim > 256:
        return f"takes head dimensions that are multiples of 8 up to 256, not {spec.head_dim}"
    return None


def slots_first(cache: Tensor) -> Tensor:
    """Views [num_blocks, kv_heads, block_size, head_dim] as [num_blocks, block_size, kv_heads, head_dim]."""
    return cache.transpose(1, 2)


def type_name(dtype: torch.dtype) -> str:
    """Returns torch's name of a dtype, such as bfloat16."""
    return str(dtype).removeprefix("torch.")
