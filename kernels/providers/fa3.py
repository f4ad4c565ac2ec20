"""The provider for FlashAttention-3 (Shah et al. 2024) from an installed `flash_attn_interface` or from a library file
that a setting names.

The operator in vLLM's wheel (`vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so`) and the operator in upstream's build take
different arguments, so calls are built from the operator's schema. Blocks may have any size. This provider has not run
on a GPU yet; tests check the mapping of arguments against both schemas, not the kernels.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.providers.base import (
    SPLIT_QUERIES,
    AttentionBatch,
    AttentionSpec,
    Unavailable,
    cannot_load,
    flash_objection,
    flash_window,
    import_for,
    slots_first,
)
from kernels.providers.schema import SchemaCall

_LOG = logging.getLogger("looseleaf.kernels")
NAMESPACES = ("_vllm_fa3_C", "flash_attn_3")
MAX_GRAPH_SPLITS = 32
"""Maximum number of splits of a sequence's keys, as in vLLM.

In a CUDA graph, it determines the size of the partial results (num_splits x T x heads x head_dim fp32). The device
decides how many splits are used. FlashAttention's own heuristic (num_splits = 0) cannot be captured.
"""
PARTIAL_ROWS = 4096
"""Maximum of splits x queries outside graphs, which limits the size of the partial results. FlashAttention's own
heuristic considers only the longest sequence. For one long sequence among short ones, it would use 15 splits for 8192
queries (2 GB for 32 heads of 128).
"""
_WHERE = frozenset({"max_seqlen_q", "max_seqlen_k", "is_causal", "window_size_left", "window_size_right", "num_splits"})
_FWD = _WHERE | {"q", "k", "v", "cu_seqlens_q", "seqused_k", "page_table", "softmax_scale"}
_METADATA = _WHERE | {
    "batch_size", "num_heads", "num_heads_k", "headdim", "headdim_v", "qkv_dtype", "seqused_k", "cu_seqlens_q",
    "page_size",
}  # fmt: skip
_NEUTRAL = {
    "attention_chunk": 0, "softcap": 0.0, "has_softcap": False, "is_rotary_interleaved": False, "sm_margin": 0,
    "cp_world_size": 1, "cp_rank": 0, "max_seqlen_k_new": 0,
}  # fmt: skip


class Fa3Attention:
    """An FA3 provider for one runner.

    If determinism is requested, it does not split keys, so a row does not depend on its batch. It is still not
    deterministic (`AttentionProvider.deterministic`), because decode and prefill sum keys in tiles of different sizes.
    The bits of a token may therefore change if the token is prefilled again after it was decoded.
    """

    name = "fa3"
    capturable = True
    deterministic = False

    def __init__(self, spec: AttentionSpec, library: str | None = None) -> None:
        """Loads the provider. Raises Unavailable if the module or file is missing or does not fit, or if the GPU or the
        model is not supported.
        """
        if (why := self.supports(spec)) is not None:
            raise Unavailable(f"attention provider fa3 {why}")
        operators, self.version = _open(library)
        self._spec = spec
        self._window = flash_window(spec.window)
        try:
            self._forward = SchemaCall(operators.fwd, _FWD, frozenset({"scheduler_metadata"}), _NEUTRAL)
            self._plan = SchemaCall(operators.get_scheduler_metadata, _METADATA, frozenset(), _NEUTRAL)
        except (ValueError, AttributeError) as error:
            raise Unavailable(f"attention provider fa3 does not fit: {error}") from error
        self._metadata: Tensor | None = None
        self._static = torch.empty(0, dtype=torch.int32, device=spec.device)
        if spec.deterministic:
            _LOG.warning("fa3: rows do not depend on their batch, but prefill and decode may differ in their last bits")

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        if spec.compute_capability != (9, 0):
            have = "none" if spec.compute_capability is None else "{}.{}".format(*spec.compute_capability)
            return f"needs a GPU of compute capability 9.0; this is {have}"
        return flash_objection(spec)

    def prepare(self, batch: AttentionBatch) -> None:
        """Computes how the keys are split, once for all layers of a decode step. In prefill, each kernel call computes
        the split itself.
        """
        self._metadata = None
        if batch.decode_only:
            metadata = self._plan(**self._shape(batch), **self._where(batch))
            self._metadata = self._at_fixed_address(metadata) if batch.is_static else metadata

    def decode(self, q: Tensor, keys: Tensor, values: Tensor, batch: AttentionBatch) -> Tensor:
        return self._attend(q, keys, values, batch, self._metadata)

    def prefill(self, q: Tensor, keys: Tensor, values: Tensor, batch: AttentionBatch) -> Tensor:
        return self._attend(q, keys, values, batch, None)

    # --- inside

    def _attend(
        self, q: Tensor, keys: Tensor, values: Tensor, batch: AttentionBatch, metadata: Tensor | None
    ) -> Tensor:
        found = self._forward(
            q=q, k=slots_first(keys), v=slots_first(values), cu_seqlens_q=batch.cu_seqlens_q,
            seqused_k=batch.context_lens, page_table=batch.block_table, softmax_scale=self._spec.softmax_scale,
            scheduler_metadata=metadata, **self._where(batch),
        )  # fmt: skip
        out: Tensor = found[0] if isinstance(found, (list, tuple)) else found
        return out

    def _where(self, batch: AttentionBatch) -> dict[str, Any]:
        """Returns the arguments that the forward call and the metadata call must share."""
        return {
            "max_seqlen_q": batch.max_q_len,
            "max_seqlen_k": self._spec.max_model_len if batch.is_static else batch.max_context_len,
            "is_causal": True,
            "window_size_left": self._window[0],
            "window_size_right": self._window[1],
            "num_splits": self._most_splits(batch),
        }

    def _most_splits(self, batch: AttentionBatch) -> int:
        """Returns the maximum number of splits of a sequence's keys. It depends only on shapes, so that profiling
        measures the memory for the splits' results. The device decides how many splits are used.
        """
        if self._spec.deterministic:
            return 1
        if batch.is_static:
            return MAX_GRAPH_SPLITS
        num_queries = max(1, int(batch.host.cu_seqlens_q[-1]))
        return min(MAX_GRAPH_SPLITS, PARTIAL_ROWS // num_queries) if num_queries <= SPLIT_QUERIES else 1

    def _shape(self, batch: AttentionBatch) -> dict[str, Any]:
        spec = self._spec
        return {
            "batch_size": batch.context_lens.shape[0], "num_heads": spec.num_heads, "num_heads_k": spec.num_kv_heads,
            "headdim": spec.head_dim, "headdim_v": spec.head_dim, "qkv_dtype": spec.dtype,
            "seqused_k": batch.context_lens, "cu_seqlens_q": batch.cu_seqlens_q, "page_size": spec.block_size,
        }  # fmt: skip

    def _at_fixed_address(self, metadata: Tensor) -> Tensor:
        """Copies the metadata to the buffer that graphs read, which is as large as the metadata of the largest batch.
        The rest of the buffer is set to zero, because the kernel may read beyond the metadata (as in vLLM).
        """
        size = metadata.numel()
        if size > self._static.numel():
            self._static = torch.zeros_like(metadata.flatten())
        self._static[size:].zero_()
        return self._static[:size].copy_(metadata.flatten())


def _open(library: str | None) -> tuple[Any, str]:
    """Returns the namespace of the operators, and a version that identifies the build. Raises Unavailable if there is
    no build or it has no such operators.
    """
    if library is not None:
        try:
            torch.ops.load_library(library)
            version = hashlib.sha256(Path(library).read_bytes()).hexdigest()[:16]
        except (OSError, RuntimeError) as error:
            raise cannot_load("fa3", library, error) from error
    else:
        module = import_for("fa3", "flash_attn_interface", " or --attention-library FILE")
        version = str(getattr(module, "__version__", "installed"))
    for name in NAMESPACES:
        namespace = getattr(torch.ops, name)
        if hasattr(namespace, "fwd"):
            return namespace, f"{name}-{version}"
    raise Unavailable(f"attention provider fa3 finds neither of the operators {' and '.join(NAMESPACES)}")
