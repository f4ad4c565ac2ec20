"""The forward pass of a worker: weights, the arena's views, one step. Knows no sequences, schedulers, Redis or RPC.

All methods are called from one thread at a time (a worker's step thread).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

import kernels
from common.settings import WorkerSettings
from common.types import DType, KvLayout
from engine.checkpoint import fingerprint
from engine.config import ModelConfig
from engine.errors import ModelError
from engine.loader import LoadFormat, open_weights
from engine.models.attention import LayerCache, StepMetadata
from engine.models.decoder import Decoder
from engine.models.opt import Opt
from engine.step import StepInput
from kernels.copy_blocks import copy_blocks
from kernels.cpu.loader import current

logger = logging.getLogger("engine")

Arena = npt.NDArray[np.uint8]
TORCH_DTYPES: dict[DType, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32}
PROFILE_MAX_KEYS = 1 << 21
"""Key positions that one profiling pass reads at most over all its sequences, to bound its time."""


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """What a runner is made from."""

    model: str | Path
    """Hugging Face model directory."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """auto: bfloat16, whose row results do not depend on the batch (DESIGN section 7)."""
    load_format: LoadFormat = "auto"
    block_size: int = 16
    max_model_len: int | None = None
    """Longest sequence in tokens; None: the model's."""
    num_threads: int = 0
    """0: one per core."""
    seed: int = 0
    """Of dummy weights."""

    @classmethod
    def of(cls, settings: WorkerSettings) -> RunnerSettings:
        """What a worker's flags say of its model."""
        return cls(
            settings.model,
            settings.dtype,
            settings.load_format,
            settings.block_size,
            settings.max_model_len,
            settings.num_threads,
            settings.seed,
        )


class ModelRunner:
    """One model, ready to step over the blocks of the arena it is bound to."""

    def __init__(self, settings: RunnerSettings) -> None:
        """Load the weights. Raises: ModelError, one sentence naming file, tensor or setting."""
        self.settings = settings
        self.config = ModelConfig.from_directory(settings.model)
        self.dtype: DType = "bfloat16" if settings.dtype == "auto" else settings.dtype
        self.layout: KvLayout = self.config.kv_layout(settings.block_size, self.dtype)
        self.max_model_len = _max_model_len(self.config, settings.max_model_len)
        self.num_threads = settings.num_threads or len(os.sched_getaffinity(0))
        self._thread = 0
        self._use_this_thread()
        directory = Path(settings.model)
        self.model_fingerprint = fingerprint(directory, self.dtype, settings.load_format, settings.seed)
        dtype = TORCH_DTYPES[self.dtype]
        with (
            torch.inference_mode(),
            open_weights(directory, self.config, dtype, settings.load_format, settings.seed) as weights,
        ):
            build = Opt if self.config.family == "opt" else Decoder
            self._model: Opt | Decoder = build(self.config, weights, self.max_model_len)
            self.weights_bytes = weights.num_bytes
        self.numerics = _numerics(self.dtype)
        self._arena: torch.Tensor | None = None  # uint8 [num_blocks, block_bytes]
        self._caches: list[LayerCache] = []

    def bind(self, arena: Arena) -> None:
        """Step over this arena from now on: uint8 [num_blocks, >= layout.block_bytes], rows contiguous, 64-byte aligned
        rows preferred. The memory must outlive the runner's use of it."""
        if arena.dtype != np.uint8 or arena.ndim != 2 or arena.shape[1] < self.layout.block_bytes:
            raise ValueError(
                f"an arena is uint8 [num_blocks, >= {self.layout.block_bytes}], not {arena.dtype} {arena.shape}"
            )
        self._arena = torch.from_numpy(arena)
        self._caches = _layer_caches(self._arena, self.layout, TORCH_DTYPES[self.dtype])

    @torch.inference_mode()
    def step(self, batch: StepInput) -> torch.Tensor:
        """Compute the batch's tokens, write their K and V, return fp32 logits [R, vocab] of the wanted rows."""
        self._use_this_thread()
        num_tokens, num_seqs = len(batch.token_ids), len(batch.context_lens)
        metadata = StepMetadata(
            positions=torch.from_numpy(batch.positions),
            slot_mapping=torch.from_numpy(batch.slot_mappings[0]),
            cu_seqlens_q=torch.from_numpy(batch.cu_seqlens_q),
            context_lens=torch.from_numpy(batch.context_lens),
            block_table=torch.from_numpy(batch.block_tables[0]),
            decode_only=num_tokens == num_seqs,
        )
        wanted = batch.logits_rows
        every_row = len(wanted) == num_tokens and bool((wanted == np.arange(num_tokens)).all())
        rows = None if every_row else torch.from_numpy(wanted)
        return self._model.forward(torch.from_numpy(batch.token_ids), metadata, self._caches, rows).float()

    def copy_blocks(self, src_ids: Sequence[int], dst_ids: Sequence[int]) -> None:
        """Copy whole blocks inside the bound arena (copy-on-write), in one call; no block may be in both lists."""
        assert self._arena is not None, "bind an arena first"
        if src_ids:
            self._use_this_thread()
            copy_blocks(self._arena, self._arena, torch.tensor(src_ids), torch.tensor(dst_ids))

    def warm_up(self) -> None:
        """Run one prefill and one decode step on scratch memory, so that the first request pays for no set-up."""
        for chunk, num_seqs in ((min(16, self.max_model_len), 1), (1, 1)):
            self._scratch_step(chunk, num_seqs, chunk)

    def profile(self, max_num_batched_tokens: int, max_num_seqs: int) -> int:
        """Peak bytes of activations over the largest steps: one prompt chunk of `max_num_batched_tokens`, and
        `max_num_seqs` decodes, both at the longest context and with logits of every row.

        Measured: the growth of the process' resident peak (VmHWM, reset through /proc/self/clear_refs) over its
        residency before. All block tables name one scratch block, so KV does not count. Where the kernel does not let
        the peak be reset the answer is an upper bound. Contexts are cut so that a pass reads at most 2 Mi keys.
        """
        self.warm_up()
        chunk = min(max_num_batched_tokens, self.max_model_len)
        before = _reset_peak_resident()
        self._scratch_step(chunk, 1, min(self.max_model_len, max(chunk, PROFILE_MAX_KEYS // chunk)))
        self._scratch_step(1, max_num_seqs, min(self.max_model_len, max(1, PROFILE_MAX_KEYS // max_num_seqs)))
        return max(0, _status_bytes("VmHWM") - before)

    # --- inside

    @contextlib.contextmanager
    def using(self, arena: Arena) -> Iterator[None]:
        """Bind another arena for a while (scratch memory, the oracle's)."""
        kept = self._arena, self._caches
        self.bind(arena)
        try:
            yield
        finally:
            self._arena, self._caches = kept

    def _scratch_step(self, chunk: int, num_seqs: int, context: int) -> None:
        """The last `chunk` of `context` positions of `num_seqs` sequences; all blocks are one scratch block."""
        num_tokens, block_size = chunk * num_seqs, self.layout.block_size
        positions = np.tile(np.arange(context - chunk, context, dtype=np.int64), num_seqs)
        batch = StepInput(
            np.zeros(num_tokens, np.int64),
            positions,
            (positions % block_size,),
            np.arange(0, num_tokens + 1, chunk, dtype=np.int32),
            np.full(num_seqs, context, np.int32),
            (np.zeros((num_seqs, -(-context // block_size)), np.int32),),
            np.arange(num_tokens, dtype=np.int64),
        )
        with self.using(np.zeros((1, self.layout.block_bytes), np.uint8)):
            self.step(batch)

    def _use_this_thread(self) -> None:
        """OpenMP keeps its thread count per calling thread: set it in whichever thread steps."""
        if self._thread != threading.get_ident():
            torch.set_num_threads(self.num_threads)
            self._thread = threading.get_ident()


def _max_model_len(config: ModelConfig, asked: int | None) -> int:
    if asked is not None and asked > config.max_model_len:
        raise ModelError(f"max_model_len {asked} is more than the model's {config.max_model_len} positions")
    return asked or config.max_model_len


def _layer_caches(arena: torch.Tensor, layout: KvLayout, dtype: torch.dtype) -> list[LayerCache]:
    """Strided per-layer views [num_blocks, kv_heads, block_size, head_dim] of the block-major arena."""
    spec = layout.groups[0]
    num_blocks, block_size = arena.shape[0], layout.block_size
    used = arena[:, : spec.block_bytes(block_size)].view(dtype)
    inner = (spec.num_kv_heads, block_size) if layout.order == "heads_first" else (block_size, spec.num_kv_heads)
    kv = used.view(num_blocks, spec.num_layers, 2, *inner, spec.head_dim)
    if layout.order == "slots_first":
        kv = kv.transpose(3, 4)
    return [LayerCache(kv[:, layer, 0], kv[:, layer, 1]) for layer in range(spec.num_layers)]


def _numerics(dtype: DType) -> str:
    """What the bits of K and V depend on beside model and layout; workers whose strings differ share no blocks."""
    isa = current().isa
    onednn = torch.backends.cpu.get_cpu_capability()
    amx = "+amx" if torch.cpu._is_amx_tile_supported() else ""
    deterministic = isa != "reference"  # torch's own attention sums in an order that depends on the batch
    return (
        f"dtype={dtype} attention=looseleaf-cpu/{kernels.__version__} isa={isa} linear=onednn/{torch.__version__} "
        f"cpu={onednn}{amx} deterministic={deterministic}"
    )


def _status_bytes(field: str) -> int:
    """A kB field of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def _reset_peak_resident() -> int:
    """Give freed memory back, reset VmHWM to what is resident, and return that in bytes."""
    with contextlib.suppress(AttributeError, OSError):  # only glibc has malloc_trim
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        logger.warning("the resident peak cannot be reset (%s): activations are overestimated", error.strerror)
    return _status_bytes("VmRSS")
