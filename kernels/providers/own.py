"""The providers that run our own kernels, which are in C++ for a CPU and in Triton for a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import kernels
from kernels.cpu.loader import current
from kernels.environment import interprets_triton
from kernels.kv_cache import EIGHT_BITS
from kernels.paged_attention import paged_attention
from kernels.paged_prefill import paged_prefill
from kernels.providers.base import AttentionBatch, AttentionSpec, Unavailable, type_name

OLDEST_COMPUTE_CAPABILITY = (8, 0)
FP8_COMPUTE_CAPABILITY = (8, 9)
"""Oldest compute capability whose hardware converts to and from e4m3."""


class CpuAttention:
    """A provider that runs `kernels.paged_attention` and `kernels.paged_prefill` on CPU tensors.

    It is deterministic unless the torch reference is in use.
    """

    name = "cpu"
    capturable = False

    def __init__(self, spec: AttentionSpec) -> None:
        if (why := self.supports(spec)) is not None:
            raise Unavailable(f"attention provider cpu {why}")
        self._how: dict[str, Any] = {
            "softmax_scale": spec.softmax_scale,
            "window": spec.window,
            "softcap": spec.softcap,
            "sinks": spec.sinks,
        }
        self.version = f"{kernels.__version__}+{current().isa}{'+tiles' if current().tiles else ''}"
        self.deterministic = current().isa != "reference"

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        if spec.device.type != "cpu":
            return f"does not run on {spec.device.type}"
        if spec.kv_dtype not in (spec.dtype, *EIGHT_BITS):
            return f"has no {type_name(spec.kv_dtype)} cache for queries in {type_name(spec.dtype)}"
        return None

    def prepare(self, batch: AttentionBatch) -> None:
        pass

    def decode(self, q: Tensor, keys: Tensor, values: Tensor, batch: AttentionBatch) -> Tensor:
        return paged_attention(q, keys, values, batch.block_table, batch.context_lens, **self._how)

    def prefill(self, q: Tensor, keys: Tensor, values: Tensor, batch: AttentionBatch) -> Tensor:
        where = (batch.block_table, batch.context_lens, batch.cu_seqlens_q)
        return paged_prefill(q, keys, values, *where, **self._how)


class TritonAttention:
    """A provider that runs `kernels.gpu.attention` on CUDA tensors.

    Under TRITON_INTERPRET=1, it also accepts CPU tensors, so that tests can run the kernels without a GPU.
    """

    name = "triton"
    capturable = True

    def __init__(self, spec: AttentionSpec) -> None:
        if (why := self.supports(spec)) is not None:
            raise Unavailable(f"attention provider triton {why}")
        try:
            import triton

            from kernels.gpu import attention
        except ImportError as error:
            raise Unavailable(f"attention provider triton cannot be imported: {error}") from error
        self._spec, self._kernels = spec, attention
        interpreted = "-interpreted" if spec.device.type == "cpu" else ""
        self.version = f"{kernels.__version__}+triton-{triton.__version__}{interpreted}"
        self.deterministic = spec.deterministic

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        if spec.device.type == "cpu" and not interprets_triton():
            return "runs on a CPU only as a rehearsal under TRITON_INTERPRET=1"
        if spec.kv_dtype not in (spec.dtype, torch.float8_e4m3fn):
            return f"has no {type_name(spec.kv_dtype)} cache; --kv-cache-dtype takes auto and fp8 on a GPU"
        capability = spec.compute_capability
        if capability is not None and capability < OLDEST_COMPUTE_CAPABILITY:
            return f"needs compute capability 8.0; this GPU has {capability[0]}.{capability[1]}"
        if spec.kv_dtype == torch.float8_e4m3fn and capability is not None and capability < FP8_COMPUTE_CAPABILITY:
            return f"needs compute capability 8.9 for an fp8 cache; this GPU has {capability[0]}.{capability[1]}"
        if spec.head_dim > 256:
            return f"takes head dimensions up to 256, not {spec.head_dim}"
        return None

    def prepare(self, batch: AttentionBatch) -> None:
        pass

    def decode(self, q: Tensor, keys: Tensor, values: Tensor, batch: AttentionBatch) -> Tensor:
        spec = self._spec
        return self._kernels.paged_attention(
            q, keys, values, batch.block_table, batch.context_lens,
            softmax_scale=spec.softmax_scale, window=spec.window, deterministic=spec.deterministic,
            softcap=spec.softcap, sinks=spec.sinks,
        )  # fmt: skip

    def prefill(self, q: Tensor, keys: Tensor, values: Tensor, batch: AttentionBatch) -> Tensor:
        spec = self._spec
        return self._kernels.paged_prefill(
            q, keys, values, batch.block_table, batch.context_lens, batch.cu_seqlens_q, max_q_len=batch.max_q_len,
            softmax_scale=spec.softmax_scale, window=spec.window, deterministic=spec.deterministic,
            softcap=spec.softcap, sinks=spec.sinks,
        )  # fmt: skip
