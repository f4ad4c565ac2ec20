"""The forward pass of a worker: weights, the arena's views, one step. No sequences, schedulers, Redis or RPC.

All methods are called from one thread at a time (a worker's step thread).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Self

import numpy as np
import torch

from common.group_need import blocks_of
from common.types import DType, kv_dtype
from engine.attention_choice import Model, choose_by_layer, spec_by_layer
from engine.binding import TORCH_DTYPES, Arena, Binding
from engine.checkpoint import fingerprint
from engine.config import ModelConfig
from engine.device import open_device
from engine.errors import ModelError, RankLost
from engine.foreign.model import TransformersModel
from engine.loader import Target, open_weights
from engine.lora import LoraModel
from engine.models.attention import LayerCache
from engine.models.decoder import Decoder
from engine.models.fused import FusedDecoder, objection
from engine.models.opt import Opt
from engine.numerics import numerics
from engine.ranks.checks import check_ranks
from engine.ranks.leader import Leader
from engine.ranks.messages import Loaded, SharedBlocks
from engine.ranks.seat import Seat
from engine.ranks.shard import Shard
from engine.runner_settings import RunnerSettings
from engine.step import StepInput
from engine.step_upload import upload
from kernels.copy_blocks import copy_blocks
from kernels.providers.base import AttentionProvider, AttentionSpec, Unavailable
from kernels.providers.choice import choose
from kernels.quantization import Bits

__all__ = ["ModelRunner", "RunnerSettings"]
logger = logging.getLogger("engine")


class ModelRunner:
    """A model that is ready to step over the blocks of the arena that it is bound to."""

    def __init__(
        self,
        settings: RunnerSettings,
        model: Model | None = None,
        *,
        seat: Seat | None = None,
        urgent: bool = False,
    ) -> None:
        """Loads the weights, unless a `model` of the same settings exists already (see `sharing`). If the settings ask
        for several ranks and there is no `seat` among them, starts the others.

        Raises ModelError, whose message is one sentence that names the file, tensor or setting.
        """
        self.settings = settings
        self.config = ModelConfig.from_directory(settings.model, settings.model_impl)
        if settings.quantization is not None and self.config.weight_format is not None:
            raise ModelError(f"quantization {settings.quantization} is for checkpoints that are not quantized already")
        self.dtype: DType = "bfloat16" if settings.dtype == "auto" else settings.dtype
        self.max_model_len = _max_model_len(self.config, settings.max_model_len)
        self.shard = (seat and seat.shard) or Shard.of(0, settings.tensor_parallel_size, settings.reduction_parts)
        self.shard.check(self.config)
        self.device = open_device(settings.device, settings.threads_of_rank, urgent)
        check_ranks(self.shard, settings, self.device)
        self._kv_dtype = kv_dtype(settings.kv_cache_dtype, self.dtype)
        self._block_size = settings.block_size or self.config.default_block_size(self._kv_dtype)
        self.device.enter()
        self.attention = self._choose_attention()
        self.model_fingerprint = fingerprint(settings.model, self.dtype, settings.load_format, settings.seed)
        self.weights_bytes = 0
        """Bytes of weights that this runner and its followers have loaded; 0 if it shares those of another."""
        self.seat = Leader(self.shard, asdict(settings)) if seat is None and self.shard.size > 1 else seat
        self.model = model or self._load()
        kind = (TORCH_DTYPES[self.dtype], self.device.torch_device)
        self.lora = LoraModel.of(self.model.sites, kind, settings) if settings.enable_lora else None
        if self.lora is not None and self.weights_bytes:
            self.weights_bytes += settings.max_loras * self.lora.max_adapter_bytes
        self.device.wait()  # another runner's stream may now read the weights
        if isinstance(self.model, TransformersModel):
            self.config = replace(self.config, memories=self.model.memories)
        self.layout, self.layer_groups = self.config.kv_groups(self._block_size, self._kv_dtype)
        self.attention_by_layer = self._attention_by_layer()
        parts = self.shard.parts
        self._numerics = numerics(self.device, self.attention, self.dtype, self._kv_dtype, settings, parts)
        if isinstance(self.seat, Leader) and self.weights_bytes:
            self.weights_bytes += self.seat.wait_loaded(Loaded(0, self.numerics, self.model_fingerprint))
        self._bound: Binding | None = None
        self.peaks: dict[tuple[int, int, bool], int] = {}
        """Peak bytes that `start_up.profile` has measured, by its arguments."""

    @classmethod
    def sharing(cls, other: Self, *, urgent: bool = False) -> Self:
        """Returns a runner over the same weights for another thread, with its own stream, buffers, graphs and binding.
        urgent: on a GPU, its steps run before those of the other runner if both wait for free multiprocessors.
        """
        runner = cls(other.settings, other.model, seat=other.seat, urgent=urgent)
        runner.lora = other.lora
        return runner

    @property
    def numerics(self) -> str:
        """The settings that affect the bits of K and V, in addition to model and layout (`engine.numerics`)."""
        foreign = f" {self.model.numerics}" if isinstance(self.model, TransformersModel) else ""
        rope = " rope=long" if self.config.rope is not None and self.config.rope.is_long(self.max_model_len) else ""
        return self._numerics + rope + foreign

    @property
    def num_threads(self) -> int:
        return self.device.num_threads

    def use_threads(self, num_threads: int) -> None:
        """Changes the number of threads, and prepares the calling thread to step. Call it before `bind`."""
        self.settings = replace(self.settings, num_threads=num_threads)
        self.device.use_threads(num_threads)

    @property
    def binding(self) -> Binding:
        """The arena that steps use, and its views."""
        assert self._bound is not None, "bind an arena first"
        return self._bound

    @property
    def bound_arena(self) -> torch.Tensor:
        """The bound arena, uint8 [num_blocks, >= block_bytes]."""
        return self.binding.arena

    def bind(self, arena: Arena, shared: SharedBlocks | None = None) -> None:
        """Sets the arena of all following steps: uint8 [num_blocks, >= layout.block_bytes] on the runner's device, with
        contiguous, preferably 64-byte-aligned rows. The memory must outlive its use by the runner. Graphs are dropped.

        shared: where the other ranks find the same memory. Without it, steps over this arena are rehearsals: they take
        the time and memory of a step, and their results mean nothing if there are several ranks.
        """
        heads = self.shard.span(self.config.num_kv_heads)
        self._bound = Binding.of(arena, self.layout, self.layer_groups, self.device.torch_device, heads)
        self._bound.fused = self._fuse(self._bound.caches)
        self._bound.is_shared = shared is not None
        if shared is not None and isinstance(self.seat, Leader):
            self.seat.share(shared)

    def new_arena(self, num_blocks: int, fill: int = 0) -> torch.Tensor:
        """Returns private blocks on the runner's device, filled with the byte `fill` (0xff: NaN in any dtype)."""
        self.device.enter()  # so that the memory is filled in the stream that will use it
        shape = (num_blocks, self.layout.block_bytes)
        return torch.full(shape, fill, dtype=torch.uint8, device=self.device.torch_device)

    @torch.inference_mode()
    def step(self, batch: StepInput) -> torch.Tensor:
        """Computes the batch's tokens, writes their K and V, and returns fp32 logits [R, vocab] of the requested rows,
        valid until the next step. On a GPU they stay on the device; the call returns after the step's completion event.
        """
        return self._on_all_ranks(batch, lambda: self._logits(batch, self.binding), self.config.vocab_size)

    def _logits(self, batch: StepInput, bound: Binding) -> torch.Tensor:
        if bound.graphs is not None and not batch.adapters and bound.graphs.takes(batch):
            return bound.graphs.run(batch)
        if bound.fused is not None and bound.fused.takes(batch):
            return bound.fused.run(batch, self.lora and self.lora.step_of(batch))
        return self._eager(batch, bound)

    @torch.inference_mode()
    def hidden_states(self, batch: StepInput) -> torch.Tensor:
        """Computes the batch's tokens, and writes their K and V, like `step`. Returns fp32 hidden states [R, h] of the
        requested rows after the last norm, from which `step` computes logits.
        """
        return self._on_all_ranks(batch, lambda: self._eager(batch, self.binding, head=False), None)

    def _on_all_ranks(
        self, batch: StepInput, compute: Callable[[], torch.Tensor], vocab_size: int | None
    ) -> torch.Tensor:
        """Runs `compute` in the device's stream, together with the other ranks. For `vocab_size`, see `Seat.run`."""
        self.device.enter()
        if self.seat is None:
            result = compute()
        else:
            result = self.seat.run(batch, compute, vocab_size, alone=not self.binding.is_shared)
        self.device.wait()
        return result

    def settle(self, error: Exception) -> None:
        """Waits for all launched work, after a step, a copy or a draw has failed with `error`. The caller may then
        release the blocks that this work writes to.

        If the device is no longer usable, raises `error` itself if it is a CUDA error (each later call would fail with
        it too), or the device's error during the wait. The same is true for the loss of a rank. The blocks must then be
        kept, and the process should end.
        """
        if isinstance(error, torch.AcceleratorError | RankLost):
            raise error
        self.device.wait()

    def copy_blocks(self, src_ids: Sequence[int], dst_ids: Sequence[int]) -> None:
        """Copies whole blocks within the bound arena (copy-on-write) in one call. No block may be in both lists."""
        arena = self.bound_arena
        if src_ids:
            self.device.enter()
            copy_blocks(arena, arena, torch.tensor(src_ids), torch.tensor(dst_ids))

    @property
    def max_blocks(self) -> int:
        """The number of columns in the block table of a sequence of maximum length."""
        return blocks_of(self.max_model_len, self.layout.block_size)

    @contextlib.contextmanager
    def using(self, arena: Arena) -> Iterator[None]:
        """Binds a different arena (scratch memory, the oracle's arena) inside a `with` block."""
        kept = self._bound
        self.bind(arena)
        try:
            yield
        finally:
            self._bound = kept

    # --- inside

    def _attention_spec(self) -> AttentionSpec:
        c, settings, device = self.config, self.settings, self.device
        dtype, stored = TORCH_DTYPES[self.dtype], TORCH_DTYPES[self._kv_dtype]
        if device.compute_capability is None and dtype == torch.float16:
            raise ModelError("dtype float16 needs a GPU; on a CPU use bfloat16 or float32")
        return AttentionSpec(
            device.torch_device, device.compute_capability, c.num_heads // self.shard.size,
            c.num_kv_heads // self.shard.size, c.head_dim,
            self._block_size, dtype, stored, c.scale_of_scores, c.window, self.max_model_len,
            settings.deterministic, c.softcap,
        )  # fmt: skip

    def _choose_attention(self, spec: AttentionSpec | None = None) -> AttentionProvider:
        """Returns the provider for all layers, or for the layers whose attention is `spec`."""
        settings = self.settings
        try:
            return choose(settings.attention_backend, spec or self._attention_spec(), settings.attention_library)
        except Unavailable as error:
            raise ModelError(str(error)) from error

    def _attention_by_layer(self) -> dict[int, tuple[AttentionProvider, int]]:
        """Returns a provider and a KV group for each layer that attends, if not all layers attend in the same way."""
        specs = spec_by_layer(self._attention_spec(), self.model, self.config)
        return choose_by_layer(specs, self.layer_groups, self._choose_attention)

    @torch.inference_mode()
    def _load(self) -> Model:
        settings = self.settings
        bits: Bits | None = None if settings.quantization is None else 8 if settings.quantization == "int8" else 4
        place = (self.shard, self.seat and self.seat.ranks)
        target = Target(TORCH_DTYPES[self.dtype], self.device.torch_device, settings.deterministic, bits, *place)
        if self.config.family == "transformers":
            where = (Path(settings.model), self.config, target, settings.load_format, settings.seed)
            foreign = TransformersModel(*where, self.max_model_len)
            self.weights_bytes = foreign.num_bytes
            return foreign
        build = Opt if self.config.family == "opt" else Decoder
        with open_weights(Path(settings.model), self.config, target, settings.load_format, settings.seed) as weights:
            model: Model = build(self.config, weights, self.max_model_len)
            self.weights_bytes = weights.num_bytes
        if self.seat is not None:
            which, size = (self.shard.rank, self.shard.size), self.weights_bytes / 2**20
            logger.info("rank %d of %d: %.1f MiB of weights, threads: %d", *which, size, self.num_threads)
        return model

    def _fuse(self, caches: Mapping[int, LayerCache]) -> FusedDecoder | None:
        """Returns a decoder that makes a pass over these caches in one call, or None if a part of the pass is not our
        own kernel on a CPU.
        """
        model = self.model
        if not isinstance(model, Decoder) or self.attention.name != "cpu" or self.settings.enforce_eager:
            return None
        if (why := objection(model)) is not None:
            logger.debug("passes do not run as one call: %s", why)
            return None
        return FusedDecoder(model, self.config, list(caches.values()), self.layer_groups)

    def _eager(self, batch: StepInput, bound: Binding, *, head: bool = True) -> torch.Tensor:
        """Starts a step of any shape. Returns fp32 logits [R, vocab], or without the `head` hidden states [R, h]."""
        wanted, num_tokens = batch.logits_rows, len(batch.token_ids)
        every_row = len(wanted) == num_tokens and bool((wanted == np.arange(num_tokens)).all())
        tokens, rows, metadata = upload(
            batch, self.device, self.attention, self.attention_by_layer, bound.states, self.layout.block_size
        )
        metadata.lora = self.lora and self.lora.step_of(batch)
        compute = self.model.forward if head else self.model.hidden
        return compute(tokens, metadata, bound.caches, None if every_row else rows).float()


def _max_model_len(config: ModelConfig, asked: int | None) -> int:
    if asked is not None and asked > config.max_model_len:
        raise ModelError(f"max_model_len {asked} is more than the model's {config.max_model_len} positions")
    return asked or config.max_model_len
