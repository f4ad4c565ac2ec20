"""The environment variables of the services that a launch starts. Settings come from flags, then from variables, then
from defaults, so a default of `serve` must not override a variable of a service.

There are three kinds of settings. `serve` reads the variable of a setting that only one service has
(`ServiceVariables`). The default of a setting that several services have is not passed to a service whose own variable
is set (`is_set`). The variable of a setting that the launch decides is refused (`check_variables`).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource

from common.errors import StartupError

PREFIXES = {
    "block_store": "LOOSELEAF_BLOCK_STORE_",
    "gateway": "LOOSELEAF_GATEWAY_",
    "prefill_svc": "LOOSELEAF_PREFILL_",
    "decode_svc": "LOOSELEAF_DECODE_",
    "looseleaf.both_roles": "LOOSELEAF_WORKER_",
}
"""The prefix of each service's variables, by package."""

_OWN = {
    "gateway": (
        "served_model_name", "pooling", "tool_call_parser", "reasoning_parser", "host", "port", "grpc_port",
        "max_queue", "max_queue_wait", "slo_ttft", "slo_itl", "lora_modules", "allow_runtime_lora_updating",
        "api_key", "api_key_file",
        "public_prefix_file", "ssl_certfile", "ssl_keyfile", "explain_requests", "ui", "strict_fields",
        "allowed_origins", "drain_delay", "vllm_grpc", "vllm_grpc_host", "vllm_grpc_tenant", "vllm_grpc_port",
        "vllm_grpc_prefill_port", "vllm_grpc_decode_port",
    ),
    "block_store": ("memory_budget", "num_blocks", "kv_disk", "kv_disk_dir"),
}  # fmt: skip
"""The settings of `serve` that only one service has, by the service's package."""
_OTHER_NAMES = {"grace_s": ("gateway", "drain_s")}
"""The settings of `serve` that have another name in the service."""

_INSIDE = {"secret_file": None, "ready_file": None}
_WORKER = _INSIDE | {
    "model": "--model", "host": None, "port": None, "block_store": None, "worker_id": None, "turns_file": None,
    "device": "--device", "num_threads": "--threads", "tensor_parallel_size": "--tensor-parallel-size",
    "pipeline_parallel_size": "--pipeline-parallel-size", "reduction_parts": "--reduction-parts",
}  # fmt: skip
DECIDED: Mapping[str, Mapping[str, str | None]] = {
    "block_store": _INSIDE | {
        "host": None, "port": None, "device": "--device", "directory": "--directory", "redis_url": "--redis-url",
        "expect_workers": "--prefill and --decode",
    },
    "gateway": _INSIDE | {
        "model": "--model", "block_store": None, "redis_url": "--redis-url", "restarts_file": None,
        "disaggregation": "--roles", "expect_workers": "--prefill and --decode",
    },
    "prefill_svc": _WORKER,
    "decode_svc": _WORKER,
    "looseleaf.both_roles": _WORKER,
}  # fmt: skip
"""The settings of services that the launch decides, each with the flags of `serve` from which it follows, if any."""


class ServiceVariables(EnvSettingsSource):
    """A source of the settings of `serve`: the variables of settings that only one service has."""

    def __init__(self, settings_class: type[BaseSettings]) -> None:
        super().__init__(settings_class, env_prefix="")
        self._variables = {name: (package, name) for package, names in _OWN.items() for name in names} | _OTHER_NAMES

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        if field_name not in self._variables:
            return None, field_name, False
        package, name = self._variables[field_name]
        value, _, is_complex = super().get_field_value(field, f"{PREFIXES[package]}{name}")
        return value, field_name, is_complex


def is_set(package: str, name: str) -> bool:
    """Returns whether the environment has the service's variable for a setting."""
    return variable(package, name) in map(str.upper, os.environ)


def variable(package: str, name: str) -> str:
    return f"{PREFIXES[package]}{name.upper()}"


def check_variables(packages: Collection[str]) -> None:
    """Checks the variables of services. `packages` are the packages that the launch starts.

    Raises StartupError if a variable sets a value that the launch decides. Also raises StartupError for a variable of a
    kind of worker that the launch does not start, unless a kind that it starts has a variable for the same setting.
    """
    for package in packages:
        for name, flags in DECIDED[package].items():
            if is_set(package, name):
                advice = "unset it" if flags is None else f"use {flags}"
                raise StartupError(
                    f"{variable(package, name)} is set, but `looseleaf serve` decides this value; {advice}"
                )
    started = [PREFIXES[package] for package in packages if DECIDED[package] is _WORKER]
    for package in sorted(PREFIXES.keys() - set(packages)):
        prefix = PREFIXES[package]
        for name in sorted(name.upper() for name in os.environ if name.upper().startswith(prefix)):
            setting = name.removeprefix(prefix)
            if not any(f"{other}{setting}" in map(str.upper, os.environ) for other in started):
                raise StartupError(_unused(name, setting, packages))


def _unused(name: str, setting: str, packages: Collection[str]) -> str:
    if "looseleaf.both_roles" in packages:
        here = f"one process hosts both roles; set {PREFIXES['looseleaf.both_roles']}{setting}, or use --roles split"
    else:
        instead = f"{PREFIXES['prefill_svc']}{setting} or {PREFIXES['decode_svc']}{setting}"
        here = f"prefill and decode run in separate processes; set {instead}, or use --roles both"
    return f"{name} is set, but {here}"
