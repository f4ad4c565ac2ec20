"""`looseleaf plan MODEL`: shows the memory that a model and a context length need, with the arithmetic. Loads no
weights.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator
from pydantic_settings import CliPositionalArg

from block_store.server import sizing
from common.group_need import floor_of
from common.settings import BLOCK_SIZE, Settings, settings_config
from common.types import DTYPE_BYTES, KV_SCALE_BYTES, KvCacheDType, KvKind, KvSpec, kv_dtype
from looseleaf.serve.device import resolve_device
from looseleaf.serve.model_source import resolve

if TYPE_CHECKING:
    from engine.config import ModelConfig

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}
GIB = 1 << 30


class PlanSettings(Settings):
    """Flags of `looseleaf plan`, which shows the memory, blocks and hosts that a model and a context length need."""

    model_config = settings_config("LOOSELEAF_PLAN_", "looseleaf plan")

    model: CliPositionalArg[str] = Field(description="Hugging Face model directory (config.json is enough) or name")
    context: int | None = Field(
        None, ge=1, description="number of tokens of a sequence, such as 256K or 1M; default: the model's limit"
    )
    sequences: int = Field(1, ge=1, description="number of sequences of that length at once")
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    kv_cache_dtype: KvCacheDType = Field("auto", description="type of the keys and values; auto: the same as dtype")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="device of the workers; auto: as on this host")
    block_size: int | None = Field(None, ge=1, le=256, description=BLOCK_SIZE)
    max_num_batched_tokens: int = Field(512, ge=1, le=1 << 20, description="maximum number of tokens in a step")
    memory: float | None = Field(None, gt=0, description="GiB of memory of a host; default: what is available here")

    @field_validator("context", mode="before")
    @classmethod
    def _with_unit(cls, given: object) -> object:
        found = re.fullmatch(r"(\d+)([kKmM]?)", str(given))
        return int(found[1]) * _UNITS[found[2].lower()] if found else given


def run(argv: Sequence[str]) -> int:
    """Prints the plan. Returns the exit status, 0."""
    settings = PlanSettings.load(argv)
    print("\n".join(plan(settings, resolve(settings.model, dummy=True).directory)))
    return 0


def plan(settings: PlanSettings, directory: Path) -> Iterator[str]:
    """Yields the lines of the plan. Raises ModelError for a model that is not supported."""
    from engine.config import ModelConfig

    config = ModelConfig.from_directory(directory)
    context = settings.context or config.max_model_len
    dtype_bytes = DTYPE_BYTES[settings.dtype]
    parameters = num_parameters(directory, config)
    weights, factors = parameters * dtype_bytes, f"{parameters:,} parameters x {dtype_bytes} bytes"
    if config.weight_format is not None and (stored := stored_bytes(directory)):
        weights, factors = stored, f"{parameters:,} parameters, quantized"
    kv_type = kv_dtype(settings.kv_cache_dtype, settings.dtype)
    device = resolve_device("auto") if settings.device == "auto" else settings.device
    block_size = settings.block_size or config.default_block_size(kv_type, context, device == "cpu")
    layout, groups = config.kv_groups(block_size, kv_type)
    attends = any(group.kind is not KvKind.STATE for group in layout.groups)
    shape = f"{config.num_layers} layers, {f'{config.num_heads} query heads' if attends else 'no attention'}"
    yield f"model    {directory.name}: {shape}, implementation {config.family}"
    yield f"weights  {factors} = {sizing.gib(weights)}"
    total = 0
    for group, count in Counter(layout.groups).items():
        blocks = group.retention.num_needed(context, layout.block_size)
        total += count * blocks * layout.block_bytes
        if group.kind is KvKind.STATE:
            yield f"states   {count} x {group.num_layers} layers x {group.state_bytes:,} bytes, at any length"
            kept = f"one is cached for every {layout.block_size} tokens"
            yield f"         {blocks:,} block of {layout.block_bytes:,} bytes; {kept}"
            continue
        yield f"KV       {count} x {group.kind.value} attention: {_per_token(group)}"
        read = f"{context:,} tokens" if group.window is None else f"window of {group.window:,} tokens"
        yield f"         {read} / {layout.block_size} = {blocks:,} blocks of {layout.block_bytes:,} bytes"
    places = sum(group.num_layers for group in layout.groups)
    if places > (needed := sum(len(group.layers) for group in groups)):
        yield f"         {places - needed} of {places} layers' places in blocks stay empty"
    together = sizing.gib(total * settings.sequences)
    yield f"         {sizing.gib(total)} a sequence, x {settings.sequences:,} = {together}"
    rules = layout.rules(settings.max_num_batched_tokens)
    prefill, decode = floor_of("prefill", context, rules), floor_of("decode", context, rules)
    least = prefill + decode
    yield f"arena    at least {prefill:,} + {decode:,} = {least:,} blocks = {sizing.gib(least * layout.block_bytes)}:"
    yield "         the floors of one prefill and one decode worker; --num-blocks counts the blocks of all KV groups"
    yield from _hosts(settings, weights, total)
    yield from _hand_over(total)
    if context > config.max_model_len:
        yield f"note     the model has {config.max_model_len:,} positions; it was not made for {context:,} tokens"


def _per_token(group: KvSpec) -> str:
    row = f"{group.head_dim} x {DTYPE_BYTES[group.dtype]} bytes"
    if scale := KV_SCALE_BYTES.get(group.dtype):
        row = f"({row} + {scale} of a scale)"
    factors = f"2 x {group.num_layers} layers x {group.num_kv_heads} KV heads x {row}"
    return f"{factors} = {group.bytes_per_token:,} bytes a token"


def _hosts(settings: PlanSettings, weights: int, sequence: int) -> Iterator[str]:
    memory = int(settings.memory * GIB) if settings.memory else sizing.available_memory()
    room = memory - weights
    where = "" if settings.memory else " available here"
    yield f"host     {sizing.gib(memory)}{where} - weights = {sizing.gib(max(0, room))} for KV"
    if room < sequence:
        yield "         too little for one such sequence, whose blocks must all be in the arena of one host"
        return
    each = room // sequence
    hosts = math.ceil(settings.sequences / each)
    yield f"         room for {each:,} such sequences; hosts for {settings.sequences:,}: {hosts:,}"


def _hand_over(sequence: int) -> Iterator[str]:
    """Yields a line that says how long it takes to send the KV of one sequence to another host, at the full rate of
    links of 1, 10 and 100 Gbit/s.
    """
    times = ", ".join(f"{sequence * 8 / (gbit * 1e9):.3g} s at {gbit} Gbit/s" for gbit in (1, 10, 100))
    yield f"hosts    a prefill on another host sends {sizing.gib(sequence)} for such a prompt, at most once: {times}"


def stored_bytes(directory: Path) -> int:
    """Returns the number of bytes of the tensors in the checkpoint's files, or 0 if there are no files."""
    from engine.checkpoint import GGUF_NAME, weight_files

    if not any(directory.glob("*.safetensors")) and not (directory / GGUF_NAME).exists():
        return 0
    return sum(end - begin for file in weight_files(directory) for _, _, begin, end in file.tensors.values())


def num_parameters(directory: Path, config: ModelConfig) -> int:
    """Returns the number of parameters, counted in the checkpoint's safetensors files. If there are no such files, or
    if the checkpoint is quantized, computes the number from the configuration.
    """
    from engine.checkpoint import weight_files
    from engine.tiny import parameter_shapes

    if any(directory.glob("*.safetensors")) and config.weight_format is None:
        return sum(math.prod(shape) for file in weight_files(directory) for _, shape, _, _ in file.tensors.values())
    if config.family != "transformers":
        return sum(math.prod(shape) for _, shape in parameter_shapes(config))
    from engine.foreign.model import num_parameters as foreign

    return foreign(directory)
