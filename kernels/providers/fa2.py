"""The provider for FlashAttention-2 (Dao 2023) from an installed `flash_attn`. The number of slots in a block must be a
multiple of 256.

This provider has not run on a GPU yet; tests check the mapping of arguments against the package's signatures (2.8.3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.providers.base import (
    AttentionBatch,
    AttentionSpec,
    Unavailable,
    flash_objection,
    flash_window,
    import_for,
    slots_first,
)


class Fa2Attention:
    """An FA2 provider for one runner. It is not deterministic (`AttentionProvider.deterministic`), because its tiles
    differ between decode and prefill. It is not captured in graphs, because newer versions of flash-attn read a maximum
    back to the host if the KV cache is paged.
    """

    name = "fa2"
    capturable = False
    deterministic = False

    def __init__(self, spec: AttentionSpec) -> None:
        """Loads the provider. Raises Unavailable if the module is missing or the GPU or model is not supported."""
        if (why := self.supports(spec)) is not None:
            raise Unavailable(f"attention provider fa2 {why}")
        self._spec, self._flash = spec, import_for("fa2", "flash_attn")
        self._window = flash_window(spec.window)
        self.version = str(getattr(self._flash, "__version__", "installed"))
        self._cu_seqlens_k: Tensor | None = None  # int32 [B + 1]

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        if spec.compute_capability is None or spec.compute_capability < (8, 0):
            return "needs a GPU of compute capability 8.0 or later"
        if spec.block_size % 256:
            return f"takes blocks of multiples of 256 slots, not {spec.block_size}"
        return flash_objection(spec)

    def prepare(self, batch: AttentionBatch) -> None:
        """Computes the cumulative context lengths, unless every sequence has a single query."""
        if not batch.decode_only:
            ends = batch.context_lens.cumsum(0, dtype=torch.int32)
            self._cu_seqlens_k = torch.nn.functional.pad(ends, (1, 0))

    def decode(self, q: Tensor, keys: Tensor, values: Tensor, batch: AttentionBatch) -> Tensor:
        out: Tensor = self._flash.flash_attn_with_kvcache(
            q.unsqueeze(1), slots_first(keys), slots_first(values),  # [B, 1, heads, head_dim]
            cache_seqlens=batch.context_lens, block_table=batch.block_table, softmax_scale=self._spec.softmax_scale,
            causal=True, window_size=self._window, num_splits=1 if self._spec.deterministic else 0,
        )  # fmt: skip
        return out.squeeze(1)

    def prefill(self, q: Tensor, keys: Tensor, values: Tensor, batch: AttentionBatch) -> Tensor:
        out: Tensor = self._flash.flash_attn_varlen_func(
            q, slots_first(keys), slots_first(values), batch.cu_seqlens_q, self._cu_seqlens_k, batch.max_q_len,
            batch.max_context_len, softmax_scale=self._spec.softmax_scale, causal=True, window_size=self._window,
            block_table=batch.block_table,
        )  # fmt: skip
        return out
