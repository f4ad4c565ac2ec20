"""Computes how many blocks an arena gets: about (budget - weights - activations - reserve - others) / block bytes, if
there is room for them. Also determines the memory limits of a node or a device.

All sizes are in bytes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from block_store.arena.header import DATA_ALIGNMENT
from common.types import KvLayout

DEFAULT_MEMORY_SHARE = 0.5
DEFAULT_ARENA_BYTES = 4 << 30
"""Maximum size of the blocks in host memory if no budget is given. It is limited because all of an arena's memory is
allocated at startup, and the machine may have other uses.
"""
SHARED_MEMORY_SHARE = 0.9
HEADER_BYTES_PER_BLOCK = 53


class CannotSize(ValueError):
    """Raised if the workers do not fit into the memory, or if the size of the memory cannot be determined."""


@dataclass(frozen=True, slots=True)
class WorkerNeeds:
    """One worker's memory outside the arena, and its requirements for the arena."""

    weights_bytes: int
    peak_activation_bytes: int
    max_model_len: int
    floor_blocks: int


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """The limits on an arena's size."""

    budget_bytes: int
    """Budget for weights, activations, reserve, KV and other programs together."""
    room_bytes: int
    """Maximum size of the blocks in shared memory or in the device's memory."""
    reserve_bytes: int
    others_bytes: int = 0
    """Memory of the device in use for other purposes than the workers' weights, such as CUDA contexts and other
    programs.
    """
    on_device: bool = False


@dataclass(frozen=True, slots=True)
class Sizing:
    """The size of an arena, and the numbers from which it was computed."""

    layout: KvLayout
    limits: DeviceLimits
    weights_bytes: int
    activation_bytes: int
    num_blocks: int
    max_model_len: int

    @property
    def blocks_of_sequence(self) -> int:
        """Number of blocks, over all KV groups, that a sequence of full length holds while it is decoded."""
        size = self.layout.block_size
        return sum(group.retention.num_needed(self.max_model_len, size) for group in self.layout.groups)

    @property
    def num_tokens(self) -> int:
        """Number of token positions that the blocks can hold if all sequences have full length."""
        return self.num_blocks * self.max_model_len // self.blocks_of_sequence

    @property
    def max_concurrency(self) -> float:
        """Number of sequences of full length that fit at the same time while they are decoded."""
        return self.num_blocks / self.blocks_of_sequence

    def lines(self) -> list[str]:
        """Returns a description in two lines, for the log."""
        kv_bytes = self.num_blocks * self.layout.block_bytes
        per_token = sum(group.bytes_per_token for group in self.layout.groups)
        limits = self.limits
        kind, others = ("device ", f"others {gib(limits.others_bytes)}, ") if limits.on_device else ("", "")
        return [
            f"{kind}memory budget {gib(limits.budget_bytes)}: weights {gib(self.weights_bytes)}, activations "
            f"{gib(self.activation_bytes)}, {others}reserve {gib(limits.reserve_bytes)}, KV {gib(kv_bytes)}",
            f"KV: {per_token:,} bytes per token, {self.layout.block_bytes:,} per block of {self.layout.block_size}; "
            f"{self.num_blocks:,} blocks, {self.num_tokens:,} tokens, maximum concurrency at "
            f"{self.max_model_len:,} tokens {self.max_concurrency:.2f}x",
        ]


def size_arena(
    layout: KvLayout, needs: Sequence[WorkerNeeds], limits: DeviceLimits, num_blocks: int | None = None
) -> Sizing:
    """Returns the size of an arena for these workers. `num_blocks` overrides the computed number of blocks.

    Raises CannotSize if no blocks remain, or fewer than the floors need.
    """
    weights = sum(worker.weights_bytes for worker in needs)
    peaks = sum(worker.peak_activation_bytes for worker in needs)
    left = limits.budget_bytes - weights - peaks - limits.reserve_bytes - limits.others_bytes
    per_block = layout.block_bytes + HEADER_BYTES_PER_BLOCK
    fitting = (min(left, limits.room_bytes) - 2 * DATA_ALIGNMENT) // per_block
    blocks = fitting if num_blocks is None else num_blocks
    floors = sum(worker.floor_blocks for worker in needs)
    if blocks < max(1, floors):
        raise CannotSize(
            f"the arena would have {max(0, blocks)} blocks but the workers need at least {max(1, floors)}: "
            f"budget {gib(limits.budget_bytes)}, weights {gib(weights)}, activations {gib(peaks)}, reserve "
            f"{gib(limits.reserve_bytes)}, {_room(limits)} or lower --max-model-len"
        )
    return Sizing(layout, limits, weights, peaks, blocks, max((worker.max_model_len for worker in needs), default=1))


def granted_floor(asked: int, role: str, num_blocks: int, num_workers: int, largest: int = 0) -> int:
    """Returns the floor of a worker. A decode worker also gets a share x of the blocks that the requested floors leave,
    so that groups that need more than one sequence of full length can also be served. `largest` is the largest floor
    that a worker requested before the arena was created: workers with different `--max-num-batched-tokens` request
    different floors.

    Suppose that the arena has N blocks, and that W workers, D of which are decode workers, request at most `a` blocks
    each. Then x = (N - W a) / (2 W). All floors together are at most W a + D x <= N - (N - W a) / 2, so half of the
    remaining blocks are available to every worker. When no other worker holds a block, a prefill worker can take N - (W
    - 1) a - D x = a + (2 W - D) x >= a + x. A group that fits into a decode worker's floor can therefore also be
    prefilled, at the latest when nothing else is running. If a killed worker's floor still counts together with its
    successor's, both fit if a <= N / (W + 2) and at least one worker is not a decode worker.
    """
    left = num_blocks - num_workers * max(asked, largest)
    return asked + max(0, left) // (2 * num_workers) if role == "decode" else asked


def _room(limits: DeviceLimits) -> str:
    """Returns the part of the error message that differs between a host and a device: remaining limits, and advice."""
    if limits.on_device:
        others, free = gib(limits.others_bytes), gib(limits.room_bytes)
        return f"others {others}, free on the device {free}; raise --gpu-memory-utilization, free the GPU,"
    return f"shared memory {gib(limits.room_bytes)}; raise --memory-budget, enlarge the shared memory,"


def device_limits(
    free_bytes: int, total_bytes: int, weights_bytes: int, utilization: float, reserve_bytes: int
) -> DeviceLimits:
    """Returns the limits of a device whose workers have loaded `weights_bytes` and freed the memory of their profiling
    runs.

    The budget is a share `utilization` of the device's memory, including the use by other processes (vLLM's
    `--gpu-memory-utilization`).
    """
    others = max(0, total_bytes - free_bytes - weights_bytes)
    return DeviceLimits(int(total_bytes * utilization), free_bytes, reserve_bytes, others, on_device=True)


def node_limits(directory: Path, budget_bytes: int | None, reserve_bytes: int) -> DeviceLimits:
    """Returns the limits of this node: the given budget, and 90 % of the free shared memory for the blocks.

    If `budget_bytes` is None, the budget is half of the available memory, with at most 4 GiB for the blocks.
    """
    stat = os.statvfs(directory)
    shared = int(stat.f_bavail * stat.f_frsize * SHARED_MEMORY_SHARE)
    if budget_bytes is None:
        budget_bytes, shared = int(available_memory() * DEFAULT_MEMORY_SHARE), min(shared, DEFAULT_ARENA_BYTES)
    return DeviceLimits(budget_bytes, shared, reserve_bytes)


def available_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns MemAvailable in bytes, or the unused part of the control group's limit (version 1 or 2) if it is smaller.
    Raises CannotSize if /proc/meminfo has no MemAvailable.
    """
    found = re.search(r"^MemAvailable:\s+(\d+) kB", (proc / "meminfo").read_text(), re.MULTILINE)
    if found is None:
        raise CannotSize(f"{proc / 'meminfo'} has no MemAvailable; give --memory-budget")
    pairs = (
        (cgroup / "memory.max", cgroup / "memory.current"),
        (cgroup / "memory/memory.limit_in_bytes", cgroup / "memory/memory.usage_in_bytes"),
    )
    return min([int(found[1]) * 1024, *_left(pairs)])


def _left(pairs: Iterable[tuple[Path, Path]]) -> list[int]:
    left: list[int] = []
    for limit, used in pairs:
        if limit.exists() and (text := limit.read_text().strip()) != "max":
            left.append(max(0, int(text) - int(used.read_text())))
    return left


def gib(size: int) -> str:
    """Returns a size in a readable form, in GiB or MiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**29 else f"{size / 2**20:.1f} MiB"
