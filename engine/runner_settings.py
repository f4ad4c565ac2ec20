"""The settings of a runner."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.cores import usable_cores
from common.settings import AttentionBackend, WorkerSettings
from common.types import KvCacheDType
from engine.config import ModelImpl
from engine.loader import LoadFormat


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """The settings of a runner, which are a part of its worker's settings."""

    model: str | Path
    """Hugging Face model directory."""
    dtype: Literal["auto", "bfloat16", "float32", "float16"] = "auto"
    """The compute dtype; auto means bfloat16 (docs/design.md, Numbers)."""
    load_format: LoadFormat = "auto"
    model_impl: ModelImpl = "auto"
    allow_variant_numerics: bool = False
    """Whether to run a model that transformers defines even if a row's result depends on its batch."""
    quantization: Literal["int8", "int4"] | None = None
    """Type to which the matrices of an unquantized checkpoint are rounded; None if they are not rounded."""
    block_size: int | None = None
    """Token positions per block; None means 16, or more if a block would otherwise be too small for recurrent states.
    """
    max_model_len: int | None = None
    """Maximum sequence length in tokens; None means the model's own limit."""
    num_threads: int = 0
    """Number of compute threads; 0 means one per usable core."""
    seed: int = 0
    """Seed of dummy weights."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    attention_backend: AttentionBackend = "auto"
    attention_library: str | None = None
    deterministic: bool = False
    """Whether a row's result must not depend on its batch. This affects only the choice of GPU kernels."""
    enforce_eager: bool = False
    kv_cache_dtype: KvCacheDType = "auto"
    """Type of keys and values in blocks (`kernels.kv_cache`): fp8 takes half the bytes of bfloat16, and int8 takes a
    little more than fp8.
    """
    tensor_parallel_size: int = 1
    """Number of processes, the *ranks*, that share each layer (docs/parallel.md)."""
    pipeline_parallel_size: int = 1
    """Number of *stages*, each of which has some of the layers."""
    reduction_parts: int | None = None
    """Number of parts in which output projections are summed (docs/parallel.md); None means
    `default_parts(tensor_parallel_size)`.
    """
    enable_lora: bool = False
    max_loras: int = 8
    max_lora_rank: int = 16

    @classmethod
    def of(cls, settings: WorkerSettings) -> RunnerSettings:
        """Returns the part of a worker's settings that concerns its model."""
        return cls(**{name: getattr(settings, name) for name in cls.__dataclass_fields__})

    @property
    def threads_of_rank(self) -> int:
        """The number of threads of a rank, an even share of the worker's threads. 0 means one per usable core."""
        if (size := self.tensor_parallel_size * self.pipeline_parallel_size) == 1:
            return self.num_threads
        return max(1, (self.num_threads or usable_cores()) // size)
