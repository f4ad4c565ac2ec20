"""The provider for FlashInfer (Ye et al. 2025) from an installed `flashinfer`. The host plans each step once, for all
layers.

This provider has not run on a GPU yet; tests check the plans against the package's signatures (0.6.9 and 0.7).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.providers.base import AttentionBatch, AttentionSpec, HostBatch, Unavailable, flash_objection, import_for

WORKSPACE_BYTES = 256 << 20
"""Size of the workspace for partial results of split keys, as in vLLM."""
Arrays = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]]


class FlashInferAttention:
    """A FlashInfer provider for one runner.

    Each batch size with a captured graph has its own wrapper, because the wrapper's buffers contain the plan that the
    graph reads. The provider is not deterministic (`AttentionProvider.deterministic`), because the distribution of keys
    depends on the batch.
    """

    name = "flashinfer"
    capturable = True
    deterministic = False

    def __init__(self, spec: AttentionSpec) -> None:
        """Loads the provider. Raises Unavailable if the module is missing or the GPU or model is not supported."""
        if (why := self.supports(spec)) is not None:
            raise Unavailable(f"attention provider flashinfer {why}")
        self._spec, self._flashinfer = spec, import_for("flashinfer", "flashinfer")
        self.version = str(getattr(self._flashinfer, "__version__", "installed"))
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=spec.device)
        self._prefill = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")
        self._eager_decode = self._decode_wrapper()
        self._static_decodes: dict[int, Any] = {}
        self._decode = self._eager_decode

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        if spec.compute_capability is None or spec.compute_capability < (8, 0):
            return "needs a GPU of compute capability 8.0 or later"
        if spec.deterministic:
            return "distributes keys according to the batch, so it cannot be deterministic"
        return flash_objection(spec)

    def prepare(self, batch: AttentionBatch) -> None:
        """Plans the step. A padding row has no blocks in the plan."""
        spec = self._spec
        starts, blocks, last_lens = (torch.from_numpy(a) for a in ragged(batch.host, spec.block_size))
        common = {
            "window_left": -1 if spec.window is None else spec.window - 1, "sm_scale": spec.softmax_scale,
            "q_data_type": spec.dtype, "kv_data_type": spec.kv_dtype,
        }  # fmt: skip
        sizes = (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.block_size)
        if batch.decode_only:
            self._decode = self._static_decode(batch) if batch.is_static else self._eager_decode
            self._decode.plan(starts, blocks, last_lens, *sizes, **common)
        else:
            queries = torch.from_numpy(batch.host.cu_seqlens_q)
            self._prefill.plan(queries, starts, blocks, last_lens, *sizes, causal=True, **common)

    def decode(self, q: Tensor, keys: Tensor, values: Tensor, batch: AttentionBatch) -> Tensor:
        out: Tensor = self._decode.run(q, (keys, values))
        return out

    def prefill(self, q: Tensor, keys: Tensor, values: Tensor, batch: AttentionBatch) -> Tensor:
        out: Tensor = self._prefill.run(q, (keys, values))
        return out

    # --- inside

    def _static_decode(self, batch: AttentionBatch) -> Any:
        num_seqs, max_blocks = batch.block_table.shape
        if num_seqs not in self._static_decodes:

            def buffer(size: int) -> Tensor:
                return torch.zeros(size, dtype=torch.int32, device=self._spec.device)

            self._static_decodes[num_seqs] = self._decode_wrapper(
                use_cuda_graph=True, paged_kv_indptr_buffer=buffer(num_seqs + 1),
                paged_kv_indices_buffer=buffer(num_seqs * max_blocks), paged_kv_last_page_len_buffer=buffer(num_seqs),
            )  # fmt: skip
        return self._static_decodes[num_seqs]

    def _decode_wrapper(self, **options: Any) -> Any:
        """Returns a decode wrapper, which uses tensor cores for groups of four or more query heads, as FlashInfer's
        documentation recommends.
        """
        grouped = self._spec.num_heads // self._spec.num_kv_heads >= 4
        wrapper = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper
        return wrapper(self._workspace, "HND", use_tensor_cores=grouped, **options)


def ragged(host: HostBatch, block_size: int) -> Arrays:
    """Concatenates the rows of a block table. Returns the start of each row, int32 [B + 1]; the blocks, int32 [N]; and
    the number of used slots in each row's last block, int32 [B].
    """
    num_blocks = -(-host.context_lens // block_size)  # [B]
    starts = np.zeros(len(num_blocks) + 1, np.int32)
    np.cumsum(num_blocks, out=starts[1:])
    used = np.arange(host.block_table.shape[1]) < num_blocks[:, None]
    last_lens = host.context_lens - np.maximum(num_blocks - 1, 0) * block_size
    return starts, np.ascontiguousarray(host.block_table[used], np.int32), last_lens.astype(np.int32)
