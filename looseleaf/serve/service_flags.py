"""The flags and variables that a launch passes to its services. This module starts nothing."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from common.secret_files import lasting_secret
from common.settings import BlockTransport
from common.tensor_parallel import default_parts
from looseleaf.serve.model_source import ModelSource
from looseleaf.serve.placement import grids_by_package, threads_per_worker
from looseleaf.serve.service_variables import is_set
from looseleaf.serve.settings import ServeSettings

_WORKER_SETTINGS = (
    "dtype", "load_format", "max_model_len", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_itl",
    "seed",
    "attention_backend", "attention_library", "deterministic", "enforce_eager", "kv_cache_dtype",
    "gpu_memory_utilization", "model_impl", "allow_variant_numerics", "quantization", "enable_lora", "max_loras",
    "max_lora_rank",
)  # fmt: skip
"""Settings that `serve` passes on to its workers under the same name."""
_LOG_SETTINGS = ("log_level", "log_format")
_VLLM_GRPC_PORTS = ("vllm_grpc_port", "vllm_grpc_prefill_port", "vllm_grpc_decode_port")
_TINY_BLOCKS = 4096
"""Number of KV blocks for the small random model."""
_SALT_SECRET = "LOOSELEAF_GATEWAY_SALT_SECRET"


def flags_of(values: Mapping[str, object | None]) -> list[str]:
    """Converts {"max_queue": 5, "seed": None, "enforce_eager": True} to ["--max-queue", "5", "--enforce-eager"]."""
    flags: list[str] = []
    for name, value in values.items():
        if value is not None and value is not False:
            flags += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return flags


def passed_on(settings: ServeSettings, package: str, names: Iterable[str]) -> list[str]:
    """Returns the flags of settings that a service has under the same name. A default is left out if the environment
    has the service's own variable.
    """
    flags: list[str] = []
    for name in names:
        if isinstance(value := getattr(settings, name), bool):
            flags += switch_of(settings, name)
        elif name in settings.model_fields_set or not is_set(package, name):
            flags += flags_of({name: value})
    return flags


def switch_of(settings: ServeSettings, name: str) -> list[str]:
    """Returns the flag of a switch if it was given, as `--name` or `--no-name`. Every switch has the same default in
    the services as in `serve`.
    """
    prefix = "" if getattr(settings, name) else "no-"
    return [f"--{prefix}{name.replace('_', '-')}"] if name in settings.model_fields_set else []


def store_flags(
    settings: ServeSettings,
    directory: Path,
    source: ModelSource,
    *,
    host: str = "127.0.0.1",
    transport: BlockTransport | None = None,
) -> list[str]:
    """Returns the flags of `python -m block_store`. `host` is the address on which it listens. With a `transport`, it
    copies blocks from the stores of other hosts.
    """
    tiny_default = _TINY_BLOCKS if source.is_tiny and settings.memory_budget is None else None
    return flags_of(
        {
            "host": host,
            "port": 0,
            "pull_blocks": transport is not None,
            "transport": transport,
            "directory": directory,
            "expect_workers": settings.prefill + settings.decode,
            "memory_budget": settings.memory_budget,
            "num_blocks": settings.num_blocks or tiny_default,
            "kv_disk": settings.kv_disk,
            "kv_disk_dir": settings.kv_disk_dir,
            "device": settings.device,
        }
    ) + passed_on(settings, "block_store", ("gpu_memory_utilization", *_LOG_SETTINGS))


def worker_flags(
    settings: ServeSettings, source: ModelSource, block_store: str, package: str, *, host: str = "127.0.0.1"
) -> list[str]:
    """Returns the flags of a worker, which listens on the address `host`. `block_store` is the store's address."""
    return (
        flags_of(
            {
                "model": source.directory,
                "host": host,
                "port": 0,
                "block_store": block_store,
                "num_threads": threads_per_worker(settings),
                "device": settings.device,
            }
        )
        + passed_on(settings, package, (*_WORKER_SETTINGS, *_LOG_SETTINGS))
        + role_flags(settings, package)
    )


def role_flags(settings: ServeSettings, package: str) -> list[str]:
    """Returns the flags that depend on the kind of worker. Workers that share blocks must have the same number of
    reduction parts.
    """
    flags: dict[str, object | None] = {}
    if package != "prefill_svc":
        flags = {name: getattr(settings, name) for name in ("preemption", "swap_space", "speculative_config")}
    grids = grids_by_package(settings)
    grid = grids[package]
    parts = settings.reduction_parts or default_parts(max(each.tensor_parallel_size for each in grids.values()))
    if parts > 1:
        flags |= {"tensor_parallel_size": grid.tensor_parallel_size, "reduction_parts": parts}
    if grid.pipeline_parallel_size > 1:
        flags |= {"pipeline_parallel_size": grid.pipeline_parallel_size}
    return flags_of(flags)


def gateway_flags(settings: ServeSettings, source: ModelSource, block_store: str | None) -> list[str]:
    """Returns the flags of `python -m gateway`. `block_store` is the address of the only store, or None if there are
    several.
    """
    names = (
        "host",
        "port",
        "grpc_port",
        "max_model_len",
        "max_queue",
        "max_queue_wait",
        "slo_ttft",
        "slo_itl",
        "api_key_file",
        "public_prefix_file",
        "pooling",
        "tool_call_parser",
        "reasoning_parser",
        "ssl_certfile",
        "ssl_keyfile",
        "explain_requests",
        "ui",
        "strict_fields",
        "allowed_origins",
        "enable_lora",
        "allow_runtime_lora_updating",
        "drain_delay",
        *_LOG_SETTINGS,
        "vllm_grpc",
        *(("vllm_grpc_host", "vllm_grpc_tenant", *_VLLM_GRPC_PORTS) if settings.vllm_grpc else ()),
    )
    listed = [part for module in settings.lora_modules for part in ("--lora-modules", module)]
    own = flags_of(
        {
            "model": source.directory,
            "served_model_name": settings.served_model_name or source.directory.name,
            "block_store": block_store,
            "drain_s": settings.grace_s,
            "disaggregation": "never" if settings.roles == "both" else "auto",
        }
    )
    return listed + own + passed_on(settings, "gateway", names)


def vllm_grpc_ports(settings: ServeSettings) -> list[int]:
    """Returns the ports of vLLM's protocol, or no ports if `vllm_grpc` is off."""
    return [getattr(settings, name) for name in _VLLM_GRPC_PORTS] if settings.vllm_grpc else []


def inside_flags(settings: ServeSettings, secret_file: Path) -> list[str]:
    """Returns the flags for internal calls: authentication, TLS and reflection."""
    names = ("tls_cert", "tls_key", "tls_ca")
    flags = flags_of({"secret_file": secret_file, **{name: getattr(settings, name) for name in names}})
    return flags + switch_of(settings, "reflection")


def store_secrets(redis_url: str) -> dict[str, str]:
    """Returns the store's secrets as environment variables, because the URL may contain a password, and every user of
    the machine can read the flags of a process.
    """
    return {"LOOSELEAF_BLOCK_STORE_REDIS_URL": redis_url}


def salt_secret(settings: ServeSettings) -> str:
    """Returns the secret of the launch's cache salts. With a disk tier, the secret is kept beside the blocks; otherwise
    tenants would not find their blocks after a restart.
    """
    return (
        secrets.token_hex(32)
        if settings.kv_disk is None
        else lasting_secret(settings.kv_disk_dir.expanduser() / "salt")
    )


def gateway_secrets(settings: ServeSettings, redis_url: str, salt: str) -> dict[str, str]:
    """Returns the gateway's secrets as environment variables. A restarted gateway must have its predecessor's salt
    secret; otherwise prompts would not find their blocks. A salt secret that the user has set is kept.
    """
    variables = {"LOOSELEAF_GATEWAY_REDIS_URL": redis_url}
    variables |= {} if _SALT_SECRET in os.environ else {_SALT_SECRET: salt}
    return variables if settings.api_key is None else variables | {"LOOSELEAF_GATEWAY_API_KEY": settings.api_key}


def with_values(flags: Sequence[str], values: Mapping[str, str]) -> tuple[str, ...]:
    """Returns `flags` with other values. Raises ValueError if a flag is not in `flags`."""
    changed = list(flags)
    for flag, value in values.items():
        changed[changed.index(flag) + 1] = value
    return tuple(changed)
