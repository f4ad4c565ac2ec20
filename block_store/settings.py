"""Settings of the block store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import ByteSize, Field

from block_store.arena.cuda import LIBRARY
from block_store.arena.placement import MemoryOwner
from common.settings import KV_DISK_DIR, Advertised, BlockTransport, ServerSettings, settings_config


class BlockStoreSettings(ServerSettings):
    """The settings of a block store. Each can be given as a flag of `python -m block_store`, or as an environment
    variable whose name begins with LOOSELEAF_BLOCK_STORE_.
    """

    model_config = settings_config("LOOSELEAF_BLOCK_STORE_", "block_store")

    port: int = Field(50054, ge=0, le=65535)
    directory: str = Field(
        default_factory=lambda: f"/dev/shm/looseleaf-{os.getuid()}",
        description="directory in shared memory for the arena and the writer slots",
    )
    redis_url: str | None = Field(
        None,
        description="Redis server for the ledger (redis://, rediss://, unix:// or redis+sentinel://); default: a "
        "private redis-server",
    )
    redis_password_file: Path | None = Field(
        None, description="a file with the password of the Redis server at --redis-url"
    )
    expect_workers: int = Field(
        2, ge=1, le=1024, description="number of workers to wait for before the arena is created"
    )
    attach_timeout_s: float = Field(
        600.0, gt=0, description="maximum time in seconds that a worker waits for the others"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: the device on which the workers compute")
    memory_budget: ByteSize | None = Field(
        None,
        gt=0,
        description="host memory for weights, activations and KV, in bytes or as 4GiB; default: half of the available "
        "memory, with at most 4 GiB of KV",
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="share of the GPU's memory to use, including weights"
    )
    memory_owner: MemoryOwner = Field(
        "auto", description="owner of the blocks on a GPU; auto: the store, or the worker if there is no CUDA IPC"
    )
    cuda_library: str = Field(LIBRARY, description="the CUDA driver")
    reserve_bytes: int = Field(256 << 20, ge=0, description="bytes of the budget to leave unused")
    num_blocks: int | None = Field(
        None, ge=1, description="number of blocks in the arena; default: computed from the budget"
    )
    keep_arena: bool = Field(False, description="keep the arena on exit")
    pull_blocks: bool = Field(
        False, description="copy blocks from the block stores of other hosts, for decode workers on this one"
    )
    transport: BlockTransport = Field(
        "bytes",
        description="how blocks travel between hosts: bytes (byte channels or gRPC), or nixl (RDMA; bytes if the other "
        "store has no such agent)",
    )
    nixl_over_tcp: bool = Field(
        False, description="for tests without RDMA: NIXL over TCP, through which anyone can read and write the arena"
    )
    kv_disk: ByteSize | None = Field(
        None,
        gt=0,
        description="bytes (or 20GiB) of disk for copies of sealed blocks, which survive a restart; each KV layout may "
        "take as much",
    )
    kv_disk_dir: Path = Field(KV_DISK_DIR, description="directory for these copies")
    byte_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="port on which other hosts read blocks without gRPC's copies; 0: any free port, opened on request",
    )
    advertise: Advertised | None = Field(None, description="host:port at which other processes reach this store")
