"""The forward pass of a worker: weights, the arena's views, one step. No sequences, schedulers, Redis or RPC.

All methods are called from one thread at a time (a worker's step thread).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

import numpy as np
import torch

from common.group_need import blocks_of
from common.settings import AttentionBackend, WorkerSettings
from common.types import DType, KvCacheDType, kv_dtype
from engine.attention_choice import Model, choose_by_layer, spec_by_layer
from engine.binding import TORCH_DTYPES, Arena, Binding
from engine.checkpoint import fingerprint
from engine.config import ModelConfig, ModelImpl
from engine.device import open_device
from engine.errors import ModelError
from engine.foreign.model import TransformersModel
from engine.loader import LoadFormat, Target, open_weights
from engine.lora import LoraModel
from engine.models.attention import LayerCache
from engine.models.decoder import Decoder
from engine.models.fused import FusedDecoder, objection
from engine.models.opt import Opt
from engine.numerics import numerics
from engine.step import StepInput
from engine.step_upload import upload
from kernels.copy_blocks import copy_blocks
from kernels.providers.base import AttentionProvider, AttentionSpec, Unavailable
from kernels.providers.choice import choose
from kernels.quantization import Bits

logger = logging.getLogger("engine")


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """The settings of a runner. Names and defaults are those of a worker's settings."""

    model: str | Path
    """Hugging Face model directory."""
    dtype: Literal["auto", "bfloat16", "float32", "float16"] = "auto"
    """The compute dtype. auto: bfloat16, whose row results do not depend on the batch (docs/design.md, Numbers)."""
    load_format: LoadFormat = "auto"
    model_impl: ModelImpl = "auto"
    allow_variant_numerics: bool = False
    """Whether to run a model of transformers even if its rows depend on their batch."""
    quantization: Literal["int8", "int4"] | None = None
    """Type to which the matrices of an unquantized checkpoint are rounded; None: they are not rounded."""
    block_size: int | None = None
    """Token positions per block; None: 16, or more if the model has recurrent states."""
    max_model_len: int | None = None
    """Longest sequence in tokens; None: the model's own limit."""
    num_threads: int = 0
    """Number of compute threads; 0: one per core."""
    seed: int = 0
    """Seed of dummy weights."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    attention_backend: AttentionBackend = "auto"
    attention_library: str | None = None
    deterministic: bool = False
    """Whether a row's result must not depend on its batch. On a CPU it never does."""
    enforce_eager: bool = False
    kv_cache_dtype: KvCacheDType = "auto"
    """Type of keys and values in blocks (`kernels.kv_cache`): int8 and fp8 take half the bytes of bfloat16."""
    enable_lora: bool = False
    max_loras: int = 8
    max_lora_rank: int = 16

    @classmethod
    def of(cls, settings: WorkerSettings) -> RunnerSettings:
        """Returns the part of a worker's settings that concerns its model."""
        return cls(**{name: getattr(settings, name) for name in cls.__dataclass_fields__})


class ModelRunner:
    """A model that is ready to step over the blocks of the arena that it is bound to."""

    def __init__(self, settings: RunnerSettings, model: Model | None = None, *, urgent: bool = False) -> None:
        """Loads the weights, unless a `model` of the same settings exists already (see `sharing`).

        Raises ModelError, whose message is one sentence that names the file, tensor or setting.
        """
        self.settings = settings
        self.config = ModelConfig.from_directory(settings.model, settings.model_impl)
        if settings.quantization is not None and self.config.weight_format is not None:
            raise ModelError(f"quantization {settings.quantization} is for checkpoints that are not quantized already")
        self.dtype: DType = "bfloat16" if settings.dtype == "auto" else settings.dtype
        self.max_model_len = _max_model_len(self.config, settings.max_model_len)
        self.device = open_device(settings.device, settings.num_threads, urgent)
        self._kv_dtype = kv_dtype(settings.kv_cache_dtype, self.dtype)
        self._block_size = settings.block_size or self.config.default_block_size(self._kv_dtype)
        self.device.enter()
        self.attention = self._choose_attention()
        self.model_fingerprint = fingerprint(settings.model, self.dtype, settings.load_format, settings.seed)
        self.weights_bytes = 0
        """Bytes of weights that this runner has loaded; 0 if it shares the weights of another runner."""
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
        self._numerics = numerics(self.device, self.attention, self.dtype, self._kv_dtype, settings)
        self._bound: Binding | None = None
        self.peaks: dict[tuple[int, int, bool], int] = {}
        """Peak bytes that `start_up.profile` has measured, by its arguments."""

    @classmethod
    def sharing(cls, other: Self, *, urgent: bool = False) -> Self:
        """Returns a runner over the same weights for another thread, with its own stream, buffers, graphs and binding.
        urgent: on a GPU, its steps run before those of the other runner if both wait for free multiprocessors.
        """
        runner = cls(other.settings, other.model, urgent=urgent)
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

    def bind(self, arena: Arena) -> None:
        """Sets the arena of all following steps: uint8 [num_blocks, >= layout.block_bytes] on the runner's device, with
        contiguous, preferably 64-byte-aligned rows. The memory must outlive its use by the runner. Graphs are dropped.
        """
        self._bound = Binding.of(arena, self.layout, self.layer_groups, self.device.torch_device)
        self._bound.fused = self._fuse(self._bound.caches)

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
        self.device.enter()
        bound = self.binding
        if bound.graphs is not None and not batch.adapters and bound.graphs.takes(batch):
            logits = bound.graphs.run(batch)
        elif bound.fused is not None and bound.fused.takes(batch):
            logits = bound.fused.run(batch, self.lora and self.lora.step_of(batch))
        else:
            logits = self._eager(batch, bound)
        self.device.wait()
        return logits

    @torch.inference_mode()
    def hidden_states(self, batch: StepInput) -> torch.Tensor:
        """Computes the batch's tokens, and writes their K and V, like `step`. Returns fp32 hidden states [R, h] of the
        requested rows after the last norm, from which `step` computes logits.
        """
        self.device.enter()
        states = self._eager(batch, self.binding, head=False)
        self.device.wait()
        return states

    def settle(self, error: Exception) -> None:
        """Waits for all launched work, after a step, a copy or a draw has failed with `error`. The caller may then
        release the blocks that this work writes to.

        If the device is no longer usable, raises `error` itself if it is a CUDA error (each later call would fail with
        it too), or the device's error during the wait. The blocks must then be kept, and the process should end.
        """
        if isinstance(error, torch.AcceleratorError):
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
            device.torch_device, device.compute_capability, c.num_heads, c.num_kv_heads, c.head_dim,
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
        target = Target(TORCH_DTYPES[self.dtype], self.device.torch_device, settings.deterministic, bits)
        if self.config.family == "transformers":
            where = (Path(settings.model), self.config, target, settings.load_format, settings.seed)
            foreign = TransformersModel(*where, self.max_model_len)
            self.weights_bytes = foreign.num_bytes
            return foreign
        build = Opt if self.config.family == "opt" else Decoder
        with open_weights(Path(settings.model), self.config, target, settings.load_format, settings.seed) as weights:
            model: Model = build(self.config, weights, self.max_model_len)
            self.weights_bytes = weights.num_bytes
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
