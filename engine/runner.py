"""The forward pass of a worker: weights, the arena's views, one step. Knows no sequences, schedulers, Redis or RPC.

All methods are called from one thread at a time (a worker's step thread).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

import numpy as np
import numpy.typing as npt
import torch

from common.settings import AttentionBackend, WorkerSettings
from common.types import DType, KvLayout
from engine.binding import TORCH_DTYPES, Arena, Binding
from engine.checkpoint import fingerprint
from engine.config import ModelConfig
from engine.device import open_device
from engine.errors import ModelError
from engine.graphs import DecodeGraphs, bucket_sizes
from engine.loader import LoadFormat, Target, open_weights
from engine.models.attention import LayerCache, StepMetadata
from engine.models.decoder import Decoder
from engine.models.fused import FusedDecoder, objection
from engine.models.opt import Opt
from engine.numerics import numerics
from engine.step import StepInput
from kernels import cpu
from kernels.copy_blocks import copy_blocks
from kernels.cpu.loader import on_triton
from kernels.cpu.selection import count_fallback
from kernels.environment import interprets_triton
from kernels.providers.base import (
    SPLIT_QUERIES,
    AttentionBatch,
    AttentionProvider,
    AttentionSpec,
    HostBatch,
    Unavailable,
)
from kernels.providers.choice import choose
from kernels.sampling import log_softmax_top, sample

logger = logging.getLogger("engine")

PROFILE_MAX_KEYS = 1 << 21
"""Key positions that one profiling pass reads at most over all its sequences, to bound its time."""
PROFILE_LAYERS_CPU = 2
"""Layers that a profiling pass runs on a CPU, where nothing of a layer but its output stays: the second begins with
what the first leaves, as all later ones do."""


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """What a runner is made from; names and defaults are those of a worker's settings."""

    model: str | Path
    """Hugging Face model directory."""
    dtype: Literal["auto", "bfloat16", "float32", "float16"] = "auto"
    """auto: bfloat16, whose row results do not depend on the batch (docs/design.md, Numbers)."""
    load_format: LoadFormat = "auto"
    block_size: int = 16
    max_model_len: int | None = None
    """Longest sequence in tokens; None: the model's."""
    num_threads: int = 0
    """0: one per core."""
    seed: int = 0
    """Of dummy weights."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    attention_backend: AttentionBackend = "auto"
    attention_library: str | None = None
    deterministic: bool = False
    """On a CPU it always is."""
    enforce_eager: bool = False
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = "auto"
    """fp8_e4m3: values as they are (scale 1), rounded and saturated; half the bytes."""

    @classmethod
    def of(cls, settings: WorkerSettings) -> RunnerSettings:
        """What a worker's flags say of its model."""
        return cls(**{name: getattr(settings, name) for name in cls.__dataclass_fields__})


class ModelRunner:
    """One model, ready to step over the blocks of the arena it is bound to."""

    def __init__(self, settings: RunnerSettings, model: Opt | Decoder | None = None, *, urgent: bool = False) -> None:
        """Load the weights, unless a `model` of the same settings is there already (see `sharing`).

        Raises: ModelError, one sentence naming file, tensor or setting.
        """
        self.settings = settings
        self.config = ModelConfig.from_directory(settings.model)
        self.dtype: DType = "bfloat16" if settings.dtype == "auto" else settings.dtype
        self.max_model_len = _max_model_len(self.config, settings.max_model_len)
        self.device = open_device(settings.device, settings.num_threads, urgent)
        kv_dtype: DType = self.dtype if settings.kv_cache_dtype == "auto" else "float8_e4m3fn"
        self.layout: KvLayout = self.config.kv_layout(settings.block_size, kv_dtype)
        self.device.enter()
        self.attention = self._choose_attention()
        self.model_fingerprint = fingerprint(settings.model, self.dtype, settings.load_format, settings.seed)
        self.weights_bytes = 0
        """Of weights that this runner has loaded; 0 for one that shares another's."""
        self._model = model or self._load()
        self.device.wait()  # another runner's stream may read the weights from now on
        self.numerics = numerics(self.device, self.attention, self.dtype, kv_dtype, settings.deterministic)
        self._bound: Binding | None = None
        self._peaks: dict[tuple[int, int, bool], int] = {}

    @classmethod
    def sharing(cls, other: Self, *, urgent: bool = False) -> Self:
        """A runner over the same weights, with a stream, buffers, graphs and a binding of its own, for a thread.

        urgent: on a GPU its steps go before the other's where both wait for room."""
        return cls(other.settings, other._model, urgent=urgent)

    @property
    def num_threads(self) -> int:
        return self.device.num_threads

    def use_threads(self, num_threads: int) -> None:
        """As if it had been loaded with so many; before it is bound. The calling thread is ready to step."""
        self.settings = replace(self.settings, num_threads=num_threads)
        self.device.use_threads(num_threads)

    @property
    def bound_arena(self) -> torch.Tensor:
        """uint8 [num_blocks, >= block_bytes]."""
        return self._binding.arena

    def bind(self, arena: Arena) -> None:
        """Step over this arena from now on: uint8 [num_blocks, >= layout.block_bytes] on the runner's device, rows
        contiguous, 64-byte aligned rows preferred. The memory must outlive the runner's use of it. Graphs are gone."""
        self._bound = Binding.of(arena, self.layout, self.device.torch_device)
        self._bound.fused = self._fuse(self._bound.caches)

    def new_arena(self, num_blocks: int, fill: int = 0) -> torch.Tensor:
        """Blocks of private memory on the runner's device, every byte `fill` (0xff is NaN in every dtype)."""
        self.device.enter()  # filled in the stream that will use it
        shape = (num_blocks, self.layout.block_bytes)
        return torch.full(shape, fill, dtype=torch.uint8, device=self.device.torch_device)

    @torch.inference_mode()
    def capture(self, max_num_seqs: int) -> None:
        """Record decode steps of up to `max_num_seqs` sequences over the bound arena, in buckets, so that they are
        replayed from now on. Does nothing on a CPU, with `enforce_eager`, or with a provider that cannot. The first
        that fails to be captured is the last that is tried; it is logged, counted and computed eagerly."""
        if not self._can_capture():
            return
        self.device.enter()
        bound, sizes = self._binding, bucket_sizes(max_num_seqs)
        bound.graphs = graphs = self._new_graphs(max_num_seqs)
        for size in reversed(sizes):
            if not self._capture(graphs, size, bound.caches):
                break
        captured = len(graphs.sizes)
        logger.info("captured %d of %d CUDA graphs of up to %d sequences", captured, len(sizes), max_num_seqs)

    @torch.inference_mode()
    def step(self, batch: StepInput) -> torch.Tensor:
        """Compute the batch's tokens, write their K and V, return fp32 logits [R, vocab] of the wanted rows, which are
        valid until the next step. On a GPU they stay there; the call returns after the step's completion event."""
        self.device.enter()
        bound = self._binding
        if bound.graphs is not None and bound.graphs.takes(batch):
            logits = bound.graphs.run(batch)
        elif bound.fused is not None and bound.fused.takes(batch):
            logits = bound.fused.run(batch)
        else:
            logits = self._eager(batch, bound.caches)
        self.device.wait()
        return logits

    def settle(self, error: Exception) -> None:
        """After a step, a copy or a draw failed with `error`: returns when nothing that was launched runs any more, so
        that the blocks it writes to may be released.

        Raises where the device is of no more use: `error` if it is a CUDA error, since each later call would fail with
        it too, or what the device says while it is waited for. Then blocks must be kept, and the process should end.
        """
        if isinstance(error, torch.AcceleratorError):
            raise error
        self.device.wait()

    def copy_blocks(self, src_ids: Sequence[int], dst_ids: Sequence[int]) -> None:
        """Copy whole blocks inside the bound arena (copy-on-write), in one call; no block may be in both lists."""
        arena = self.bound_arena
        if src_ids:
            self.device.enter()
            copy_blocks(arena, arena, torch.tensor(src_ids), torch.tensor(dst_ids))

    def warm_up(self) -> None:
        """Run what requests may need on scratch memory, so that none of them pays for set-up: a prefill and a decode
        step; where kernels are compiled at their first launch also every other variant of one."""
        self._scratch_step(min(16, self.max_model_len), 1, min(16, self.max_model_len))
        logits = self._scratch_step(1, 1, 1)
        if on_triton(logits):
            self._compile_the_rest(logits)

    def profile(self, max_num_batched_tokens: int, max_num_seqs: int, *, graphs: bool = False) -> int:
        """Peak bytes of activations over the largest steps: prompt chunks of `max_num_batched_tokens` (one, or as many
        longest prompts as that is), and `max_num_seqs` decodes with every filter of sampling, both at the longest
        context and with logits of every row. With `graphs` also what `capture(max_num_seqs)` will take.

        All block tables name one scratch block, so KV does not count. Contexts are cut so that a pass reads at most
        2 Mi keys; on a CPU a pass ends after two layers, so that a start does not wait for it. Measured once.
        """
        asked = (max_num_batched_tokens, max_num_seqs, graphs)
        if (known := self._peaks.get(asked)) is not None:
            return known
        self.warm_up()
        chunk = min(max_num_batched_tokens, self.max_model_len)
        num_prompts = min(max_num_seqs, max_num_batched_tokens // chunk)

        def largest_steps() -> None:
            self._scratch_step(chunk, num_prompts, min(self.max_model_len, max(chunk, PROFILE_MAX_KEYS // chunk)))
            if self.device.compute_capability is not None:  # keys of few queries may be split into partial results
                few = min(chunk, SPLIT_QUERIES)
                self._scratch_step(few, 1, few)
            context = min(self.max_model_len, max(1, PROFILE_MAX_KEYS // max_num_seqs))
            logits = self._scratch_step(1, max_num_seqs, context, width=self._max_blocks)  # partial results go by width
            floats, ints = [0.5] * max_num_seqs, [1] * max_num_seqs
            sample(logits, floats, ints, floats, floats, ints, ints, ints)

        with self._shallow():
            peak = self.device.peak_bytes(largest_steps)
        if graphs:
            peak += self._graph_bytes(max_num_seqs)
        self.device.release()
        self._peaks[asked] = peak
        return peak

    @contextlib.contextmanager
    def using(self, arena: Arena) -> Iterator[None]:
        """Bind another arena for a while (scratch memory, the oracle's)."""
        kept = self._bound
        self.bind(arena)
        try:
            yield
        finally:
            self._bound = kept

    # --- inside

    @property
    def _binding(self) -> Binding:
        assert self._bound is not None, "bind an arena first"
        return self._bound

    def _choose_attention(self) -> AttentionProvider:
        c, settings, device = self.config, self.settings, self.device
        dtype, kv_dtype = TORCH_DTYPES[self.dtype], TORCH_DTYPES[self.layout.groups[0].dtype]
        if device.compute_capability is None and dtype == torch.float16:
            raise ModelError("dtype float16 needs a GPU; on a CPU take bfloat16 or float32")
        interpret = device.compute_capability is None and interprets_triton()
        if settings.attention_backend == "triton" and interpret:
            cpu.load("triton")  # a rehearsal: all kernels of this process, as they would run on a GPU
        spec = AttentionSpec(
            device.torch_device, device.compute_capability, c.num_heads, c.num_kv_heads, c.head_dim,
            settings.block_size, dtype, kv_dtype, c.head_dim**-0.5, c.window, self.max_model_len,
            settings.deterministic,
        )  # fmt: skip
        try:
            return choose(settings.attention_backend, spec, settings.attention_library)
        except Unavailable as error:
            raise ModelError(str(error)) from error

    @torch.inference_mode()
    def _load(self) -> Opt | Decoder:
        settings = self.settings
        target = Target(TORCH_DTYPES[self.dtype], self.device.torch_device, settings.deterministic)
        build = Opt if self.config.family == "opt" else Decoder
        with open_weights(Path(settings.model), self.config, target, settings.load_format, settings.seed) as weights:
            model: Opt | Decoder = build(self.config, weights, self.max_model_len)
            self.weights_bytes = weights.num_bytes
        return model

    def _fuse(self, caches: Sequence[LayerCache]) -> FusedDecoder | None:
        """A pass over these in one call, where the model, its linears and its attention are ours on a CPU."""
        model = self._model
        if not isinstance(model, Decoder) or self.attention.name != "cpu" or self.settings.enforce_eager:
            return None
        if (why := objection(model, caches)) is not None:
            logger.debug("a pass is many calls: %s", why)
            return None
        return FusedDecoder(model, self.config, caches)

    def _eager(self, batch: StepInput, caches: Sequence[LayerCache]) -> torch.Tensor:
        """Start a step of any shape; fp32 logits [R, vocab]."""
        wanted, num_tokens = batch.logits_rows, len(batch.token_ids)
        every_row = len(wanted) == num_tokens and bool((wanted == np.arange(num_tokens)).all())
        host = HostBatch(batch.cu_seqlens_q, batch.context_lens, batch.block_tables[0])
        tokens, positions, slots, starts, lens, table, rows = self.device.upload(
            [batch.token_ids, batch.positions, batch.slot_mappings[0], *_arrays(host), wanted]
        )
        decode_only = num_tokens == len(batch.context_lens)
        on_device = AttentionBatch(starts, lens, table, host, decode_only)
        self.attention.prepare(on_device)
        metadata = StepMetadata(positions, slots, on_device, self.attention)
        return self._model.forward(tokens, metadata, caches, None if every_row else rows).float()

    def _can_capture(self) -> bool:
        if self.device.compute_capability is None or self.settings.enforce_eager:
            return False
        if not self.attention.capturable:
            logger.info("no CUDA graphs: attention provider %s cannot be captured", self.attention.name)
        return self.attention.capturable

    def _new_graphs(self, max_num_seqs: int) -> DecodeGraphs:
        """Without a bucket yet."""
        logits = torch.empty((max_num_seqs, self.config.vocab_size), device=self.device.torch_device)
        return DecodeGraphs(self.device, self.attention, self._max_blocks, logits)

    def _capture(self, graphs: DecodeGraphs, size: int, caches: Sequence[LayerCache]) -> bool:
        """Whether one bucket could be captured; if not, that is logged and counted, and no other should be tried.

        Errors: what the device says where it is of no more use."""
        try:
            graphs.capture(size, lambda tokens, step: self._model.forward(tokens, step, caches, None))
        except Exception as error:  # torch's, CUDA's, Triton's
            self.device.wait()
            count_fallback("decode graph", (str(error) or repr(error)).splitlines()[0], "eagerly")
            return False
        return True

    @torch.inference_mode()
    def _graph_bytes(self, max_num_seqs: int) -> int:
        """What `capture` will take, from its largest two buckets: the first, and the second for each of the rest."""
        if not self._can_capture():
            return 0
        sizes = bucket_sizes(max_num_seqs)[::-1]
        marks = [self.device.used_bytes()]
        with self.using(self.new_arena(1)):
            graphs = self._new_graphs(max_num_seqs)
            for size in sizes[:2]:
                if not self._capture(graphs, size, self._binding.caches):
                    break
                marks.append(self.device.used_bytes())
        growth = [max(0, after - before) for before, after in itertools.pairwise(marks)]
        return growth[0] + growth[-1] * (len(sizes) - 1) if growth else 0

    def _compile_the_rest(self, logits: torch.Tensor) -> None:
        """Variants beside those of a whole prompt and a short decode; `logits` fp32 [1, vocab] of any step."""
        chunk = min(2, self.max_model_len)
        self._scratch_step(chunk, 2, chunk)  # short chunks take other tiles than long ones
        for bits in range(self._max_blocks.bit_length() + 1):  # wide tables are read in splits, in powers of two
            self._scratch_step(1, 1, 1, width=min(1 << bits, self._max_blocks))
        log_softmax_top(logits, torch.zeros(1, dtype=torch.int64, device=logits.device), 1)
        with self.using(self.new_arena(2)):
            self.copy_blocks([0], [1])

    @contextlib.contextmanager
    def _shallow(self) -> Iterator[None]:
        """On a CPU only the first layers of the model for a while."""
        model = self._model
        if self.device.compute_capability is None:
            self._model = model.shallow(PROFILE_LAYERS_CPU)
        try:
            yield
        finally:
            self._model = model

    @property
    def _max_blocks(self) -> int:
        """Columns of the block table of a sequence of full length."""
        [group] = self.layout.groups
        return group.max_blocks(self.max_model_len, self.layout.block_size)

    def _scratch_step(self, chunk: int, num_seqs: int, context: int, width: int | None = None) -> torch.Tensor:
        """The last `chunk` of `context` positions of `num_seqs` sequences; all blocks are one scratch block. width:
        columns of the block table; None: as many as the context takes."""
        num_tokens, block_size = chunk * num_seqs, self.layout.block_size
        positions = np.tile(np.arange(context - chunk, context, dtype=np.int64), num_seqs)
        batch = StepInput(
            np.zeros(num_tokens, np.int64),
            positions,
            (positions % block_size,),
            np.arange(0, num_tokens + 1, chunk, dtype=np.int32),
            np.full(num_seqs, context, np.int32),
            (np.zeros((num_seqs, width or -(-context // block_size)), np.int32),),
            np.arange(num_tokens, dtype=np.int64),
        )
        with self.using(self.new_arena(1)):
            return self.step(batch)


def _arrays(host: HostBatch) -> tuple[npt.NDArray[np.int32], ...]:
    return host.cu_seqlens_q, host.context_lens, host.block_table


def _max_model_len(config: ModelConfig, asked: int | None) -> int:
    if asked is not None and asked > config.max_model_len:
        raise ModelError(f"max_model_len {asked} is more than the model's {config.max_model_len} positions")
    return asked or config.max_model_len
