"""Loads a model and computes steps over the blocks of an arena."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Self

import numpy as np
import torch

from common.group_need import blocks_of
from common.types import DType, kv_dtype
from engine.attention_choice import Model, choose_by_layer, kv_order, spec_by_layer
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
from engine.ranks.place import Place
from engine.ranks.seat import Compute, Seat, Wanted
from engine.runner_settings import RunnerSettings
from engine.step import StepInput
from engine.step_upload import upload
from kernels.copy_blocks import copy_blocks
from kernels.providers.base import AttentionProvider, AttentionSpec, Unavailable
from kernels.providers.choice import choose
from kernels.quantization import Bits
from kernels.sampling import RepeatedSample

__all__ = ["ModelRunner", "RunnerSettings"]
logger = logging.getLogger("engine")


class ModelRunner:
    """A model that computes steps over the blocks of an arena. Only one thread at a time may call its methods."""

    def __init__(
        self,
        settings: RunnerSettings,
        model: Model | None = None,
        *,
        seat: Seat | None = None,
        urgent: bool = False,
    ) -> None:
        """Loads the weights, unless `model` is given (see `sharing`). If the settings require several ranks and `seat`
        is None, starts the other ranks. Raises StartupError, usually its subclass ModelError, if the model cannot be
        loaded.
        """
        self.settings = settings
        self.config = ModelConfig.from_directory(settings.model, settings.model_impl)
        if settings.quantization is not None and self.config.weight_format is not None:
            raise ModelError(f"quantization {settings.quantization} is for checkpoints that are not quantized already")
        self.dtype: DType = "bfloat16" if settings.dtype == "auto" else settings.dtype
        self.max_model_len = self.config.longest(settings.max_model_len)
        self.place = Place.of(0, settings) if seat is None else seat.place
        self.place.check(self.config)
        self.device = open_device(settings.device, settings.threads_of_rank, urgent)
        check_ranks(self.place, settings, self.device)
        self._kv_dtype = kv_dtype(settings.kv_cache_dtype, self.dtype)
        usual = self.config.default_block_size(self._kv_dtype, self.max_model_len, self.device.name == "cpu")
        self._block_size = settings.block_size or usual
        self.device.enter()
        self.attention = self._choose_attention()
        self.model_fingerprint = fingerprint(settings.model, self.dtype, settings.load_format, settings.seed)
        self.weights_bytes = 0
        """Bytes of weights that this runner and its followers have loaded, and of the memory set aside for adapters; 0
        if it shares the weights of another runner.
        """
        self.seat = Leader(self.place, asdict(settings)) if seat is None and self.place.size > 1 else seat
        self.model = model or self._load()
        kind = (TORCH_DTYPES[self.dtype], self.device.torch_device)
        self.lora = LoraModel.of(self.model.sites, kind, settings) if settings.enable_lora else None
        if self.lora is not None and self.weights_bytes:
            self.weights_bytes += settings.max_loras * self.lora.max_adapter_bytes
        self.device.wait()  # another runner's stream may now read the weights
        if isinstance(self.model, TransformersModel):
            self.config = replace(self.config, memories=self.model.memories)
        layout, self.layer_groups = self.config.kv_groups(self._block_size, self._kv_dtype)
        self.layout = replace(layout, order=kv_order(self.attention, self._kv_dtype, self._block_size))
        self.attention_by_layer = self._attention_by_layer()
        parts = self.place.shard.parts
        self._numerics = numerics(self.device, self.attention, self.dtype, self._kv_dtype, settings, parts)
        if isinstance(self.seat, Leader) and self.weights_bytes:
            self.weights_bytes += self.seat.wait_loaded(Loaded(0, self.numerics, self.model_fingerprint))
        self._bound: Binding | None = None
        self.peaks: dict[tuple[int, int, bool], int] = {}
        """Peak bytes of activations, by the arguments of `start_up.profile`, which measured them."""

    @classmethod
    def sharing(cls, other: Self, *, urgent: bool = False) -> Self:
        """Returns a runner for another thread, with the settings of `other`, that shares the weights, adapters and
        ranks of `other`. `urgent` has the same meaning as in `CudaDevice.__init__`.
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
        """Changes the number of threads. On a CPU, prepares the calling thread for steps. Call this before `bind`."""
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
        """Sets the arena that steps use: uint8 [num_blocks, >= layout.block_bytes] on the runner's device, with
        contiguous, preferably 64-byte-aligned rows. The memory must outlive its use by the runner.

        `shared` is the location of the same memory for the other ranks. If it is None and there are several ranks,
        steps are rehearsals, which take the time and memory of a step but have meaningless results.
        """
        heads = self.place.shard.span(self.config.num_kv_heads)
        self._bound = Binding.of(arena, self.layout, self.layer_groups, self.device.torch_device, heads)
        self._bound.fused = self._fuse(self._bound.caches)
        self._bound.is_shared = shared is not None
        if shared is not None and isinstance(self.seat, Leader):
            self.seat.share(shared)

    def new_arena(self, num_blocks: int, fill: int = 0) -> torch.Tensor:
        """Returns a private arena on the runner's device, whose bytes are all `fill`."""
        self.device.enter()  # so that the memory is filled in the stream that will use it
        shape = (num_blocks, self.layout.block_bytes)
        return torch.full(shape, fill, dtype=torch.uint8, device=self.device.torch_device)

    @torch.inference_mode()
    def step(self, batch: StepInput, draw: RepeatedSample | None = None) -> torch.Tensor:
        """Computes the batch's tokens, writes their K and V, and returns fp32 logits [R, vocab] of the requested rows,
        valid until the next step. On a GPU, the logits stay on the device, and the call returns after the step's
        completion event. If the pass is one C call, it also runs `draw` (`Sampler.prepare`).
        """
        return self._on_all_ranks(batch, lambda part, states: self._logits(part, states, draw), has_head=True)

    def _logits(self, batch: StepInput, states: torch.Tensor | None, draw: RepeatedSample | None) -> torch.Tensor:
        bound = self.binding
        if bound.graphs is not None and not batch.adapters and bound.graphs.takes(batch):
            return bound.graphs.run(batch)
        if bound.fused is not None and bound.fused.takes(batch):
            return bound.fused.run(batch, self.lora and self.lora.step_of(batch), states, None if self.seat else draw)
        return self._eager(batch, states)

    @torch.inference_mode()
    def hidden_states(self, batch: StepInput) -> torch.Tensor:
        """Computes the batch's tokens and writes their K and V, as `step` does. Returns the fp32 hidden states [R, h]
        of the requested rows after the last norm, from which `step` computes logits.
        """
        return self._on_all_ranks(batch, lambda part, states: self._eager(part, states, head=False), has_head=False)

    def _on_all_ranks(self, batch: StepInput, compute: Compute, *, has_head: bool) -> torch.Tensor:
        """Runs `compute` in the device's stream, with the other ranks if there are several. Waits for the result."""
        self.device.enter()
        if self.seat is None:
            result = compute(batch, None)
        else:
            wanted = Wanted(has_head, self.config.vocab_size, self.config.hidden_size, TORCH_DTYPES[self.dtype])
            result = self.seat.run(batch, compute, wanted, alone=not self.binding.is_shared)
        self.device.wait()
        return result

    def settle(self, error: Exception) -> None:
        """Waits for all launched work after a step, a copy or a draw has failed with `error`. The caller may then
        release the blocks that this work writes to. If the device is no longer usable or a rank is lost, raises
        `error`, or the error that the device reports during the wait. The blocks must then be kept, and the process
        should end.
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
            device.torch_device, device.compute_capability, c.num_heads // self.place.shard.size,
            c.num_kv_heads // self.place.shard.size, c.head_dim,
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
        """Returns a provider and a KV group for each layer that attends. The result is empty for a native model whose
        layers all attend in the same way.
        """
        specs = spec_by_layer(self._attention_spec(), self.model, self.config)
        return choose_by_layer(specs, self.layer_groups, self._choose_attention)

    @torch.inference_mode()
    def _load(self) -> Model:
        settings = self.settings
        bits: Bits | None = None if settings.quantization is None else 8 if settings.quantization == "int8" else 4
        place = (self.place.shard, self.place.stage, self.seat and self.seat.ranks)
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
            which, size = (self.place.rank, self.place.size), self.weights_bytes / 2**20
            logger.info("rank %d of %d: %.1f MiB of weights, threads: %d", *which, size, self.num_threads)
        return model

    def _fuse(self, caches: Mapping[int, LayerCache]) -> FusedDecoder | None:
        """Returns a decoder that runs a pass over these caches in one C call, or None if the model, the attention
        provider or the settings do not allow this.
        """
        model = self.model
        if not isinstance(model, Decoder) or self.attention.name != "cpu" or self.settings.enforce_eager:
            return None
        if (why := objection(model)) is not None:
            logger.debug("passes do not run as one call: %s", why)
            return None
        return FusedDecoder(model, self.config, caches, self.layer_groups)

    def _eager(self, batch: StepInput, states: torch.Tensor | None, *, head: bool = True) -> torch.Tensor:
        """Computes a step of any shape without CUDA graphs. Returns fp32 logits [R, vocab], or hidden states [R, h] if
        `head` is False. For `states` and the result of a stage, see `Compute`.
        """
        wanted, num_tokens, bound = batch.logits_rows, len(batch.token_ids), self.binding
        every_row = len(wanted) == num_tokens and bool((wanted == np.arange(num_tokens)).all())
        tokens, rows, metadata = upload(
            batch, self.device, self.attention, self.attention_by_layer, bound.states, self.layout.block_size
        )
        metadata.lora = self.lora and self.lora.step_of(batch)
        compute = self.model.forward if head else self.model.hidden
        found = compute(tokens if states is None else states, metadata, bound.caches, None if every_row else rows)
        return found.float() if self.place.stage.is_last else found
