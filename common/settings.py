"""The base classes of the services' settings. Each field of a class defines a flag and an environment variable.

For example, the field `max_num_seqs` of a service with the prefix LOOSELEAF_DECODE_ can be set by the flag
`--max-num-seqs` or by the variable LOOSELEAF_DECODE_MAX_NUM_SEQS. Flags override variables, and variables override
defaults. pydantic-settings ignores a mistyped variable even with extra="forbid", so `Settings` itself rejects variables
that have the prefix but match no field.
"""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, NoReturn, Self

from pydantic import AfterValidator, Field, ValidationError
from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict, SettingsError

from common.command_line import hide_values
from common.telemetry import LogFormat
from common.tensor_parallel import MOST_RANKS
from common.types import KvCacheDType

AttentionBackend = Literal["auto", "triton", "fa3", "fa2", "flashinfer", "cpu"]
BlockTransport = Literal["bytes", "nixl"]
BLOCK_SIZE = (
    "number of token positions in a block; default: 16, or 64 on a CPU if the longest sequence has at least 4,096 "
    "tokens; more for recurrent states"
)
KV_CACHE_DTYPE = "type of keys and values; auto: the model's; int8 and fp8 take about half the bytes of bfloat16"
TENSOR_PARALLEL_SIZE = "number of processes that share each layer of a worker's model: 1, 2, 4 or 8"
PIPELINE_PARALLEL_SIZE = "number of stages, each with some of the layers of a worker's model in processes of its own"
REDUCTION_PARTS = (
    "number of sums that the products of all ranks are divided into; workers share blocks only if it is the same; "
    "default: 1 without tensor parallelism, else 4, or the largest size if it is more"
)
MAX_ITL = (
    "aim for the inter-token latency in ms where prefill and decode take turns on the same cores; prefill steps are "
    "shortened for it; 0: no limit; default: 125, or seven times a decode step if that is longer"
)
LOG_FORMAT = "form of log lines; json: one object a line, with the ids of the request and of its trace"
KV_DISK_DIR = Path("~/.cache/looseleaf/kv")


def _reachable(address: str) -> str:
    host, _, port = address.rpartition(":")
    try:
        is_host = not ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:  # a name
        is_host = bool(host)
    if not is_host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError("must be the HOST:PORT at which others reach this service, not an address of all interfaces")
    return address


Advertised = Annotated[str, AfterValidator(_reachable)]
"""The address at which other processes reach a service."""


class Settings(BaseSettings):
    """The base class of a program's settings. A subclass sets `model_config = settings_config("LOOSELEAF_X_", "x")` and
    declares fields. A program calls `load(argv)` of its subclass. The values of fields with `repr=False` are secrets:
    `load` removes them from the command line that other users can see, and its error messages do not show them.
    """

    model_config = SettingsConfigDict(extra="forbid")

    @classmethod
    def load(cls, argv: Sequence[str]) -> Self:
        """Returns settings from flags and the environment. On an error, prints the cause and exits with status 2."""
        hide_values([f"--{name.replace('_', '-')}" for name, field in cls.model_fields.items() if not field.repr])
        try:
            cls.refuse_unknown_variables()
            return CliApp.run(cls, cli_args=list(argv))
        except ValidationError as error:
            prog = str(cls.model_config.get("cli_prog_name"))
            for item in error.errors():
                name = "--" + ".".join(str(part) for part in item["loc"]).replace("_", "-")
                shows = item["type"] != "missing" and not cls._is_secret(item["loc"])  # "missing" would show all inputs
                got = f" (got {item.get('input')!r})" if shows else ""
                print(f"{prog}: setting {name}: {item['msg']}{got}", file=sys.stderr)
            sys.exit(2)
        except SettingsError as error:
            _refuse(str(cls.model_config.get("cli_prog_name")), str(error))

    @classmethod
    def _is_secret(cls, location: Sequence[int | str]) -> bool:
        """Returns whether an error's location lies in a field whose value must not be shown."""
        field = cls.model_fields.get(str(location[0])) if location else None
        return field is not None and not field.repr

    @classmethod
    def refuse_unknown_variables(cls) -> None:
        """Exits with status 2 if an environment variable with the class's prefix matches no field."""
        prefix = str(cls.model_config.get("env_prefix", ""))
        known = {prefix + name.upper() for name in cls.model_fields}
        unknown = sorted(name for name in os.environ if name.upper().startswith(prefix) and name.upper() not in known)
        if unknown:
            prog = str(cls.model_config.get("cli_prog_name"))
            _refuse(prog, f"unknown environment variable {unknown[0]}; the variables are {', '.join(sorted(known))}")


def settings_config(env_prefix: str, prog: str) -> SettingsConfigDict:
    """Returns the model_config of a service's settings."""
    return SettingsConfigDict(
        env_prefix=env_prefix,
        extra="forbid",
        cli_prog_name=prog,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
    )


def _refuse(prog: str, message: str) -> NoReturn:
    print(f"{prog}: {message}", file=sys.stderr)
    sys.exit(2)


class VllmGrpcSettings(Settings):
    """The settings of vLLM's gRPC protocol. They belong to the gateway, and `looseleaf serve` passes them on to it."""

    vllm_grpc: bool = Field(
        False,
        description="also speak vLLM's gRPC protocol, for routers such as SMG, on separate ports; needs looseleaf[smg]",
    )
    vllm_grpc_host: str = Field(
        "127.0.0.1", description="address of vLLM's protocol; addresses other than loopback require an API key"
    )
    vllm_grpc_tenant: str | None = Field(
        None,
        min_length=1,
        description="tenant of callers of vLLM's protocol without a key, such as SMG; only on loopback; default: none",
    )
    vllm_grpc_port: int = Field(
        50061, ge=0, le=65535, description="port of vLLM's protocol for whole requests; 0: any free port"
    )
    vllm_grpc_prefill_port: int = Field(
        50062, ge=0, le=65535, description="port at which a router asks for prefill only; 0: any free port"
    )
    vllm_grpc_decode_port: int = Field(
        50063, ge=0, le=65535, description="port at which a router asks decode to continue a prefill; 0: any free port"
    )


class ServerSettings(Settings):
    """The settings that all servers share, such as addresses, credentials and logs."""

    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535)
    """gRPC port. 0 chooses any free port."""
    ready_file: str | None = None
    """A file that is written when the service is ready. Its first line is an address, host:port, at which the service
    listens.
    """
    secret_file: Path | None = Field(
        None,
        description="a file with the deployment's secret, the same for all services; every internal call must carry it",
    )
    tls_cert: Path | None = Field(
        None, description="this service's certificate for internal calls (PEM), with the name looseleaf.internal"
    )
    tls_key: Path | None = Field(None, description="private key of that certificate")
    tls_ca: Path | None = Field(
        None, description="the CA of all services; with it, services use TLS and verify each other"
    )
    reflection: bool = Field(True, description="let callers list the gRPC methods and HTTP paths")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    log_format: LogFormat = Field("text", description=LOG_FORMAT)


class WorkerSettings(ServerSettings):
    """The settings that prefill and decode workers share. A setting that vLLM also has keeps vLLM's name."""

    model: str = Field(description="Hugging Face model directory")
    block_store: str = Field("127.0.0.1:50054", description="host:port of the block store")
    worker_id: str | None = Field(
        None, description="this worker's name; default: role, host name, process id and a random part"
    )
    advertise: Advertised | None = Field(None, description="host:port at which gateways reach this worker")
    dtype: Literal["auto", "bfloat16", "float32", "float16"] = Field("auto", description="float16 only on a GPU")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda if torch sees a GPU")
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    model_impl: Literal["auto", "native", "transformers"] = Field(
        "auto", description="which model definition to run; auto: ours if there is one, else that of transformers"
    )
    quantization: Literal["int8", "int4"] | None = Field(
        None, description="round the weights of linear layers to 8 or 4 bits; default: keep those of the checkpoint"
    )
    allow_variant_numerics: bool = Field(
        False,
        description="serve a model even if its rows depend on their batch, so that tokens may vary with the load",
    )
    max_model_len: int | None = Field(
        None, ge=1, description="length of the longest sequence in tokens; default: the model's limit"
    )
    block_size: int | None = Field(None, ge=1, le=256, description=BLOCK_SIZE)
    max_num_seqs: int = Field(64, ge=1, le=4096, description="maximum number of sequences in a step")
    max_num_batched_tokens: int = Field(512, ge=1, le=1 << 20, description="maximum number of tokens in a step")
    max_queue: int = Field(1024, ge=0, description="maximum number of requests that wait at this worker")
    num_threads: int = Field(0, ge=0, description="number of threads that compute the model; 0: one per core")
    tensor_parallel_size: int = Field(1, ge=1, le=MOST_RANKS, description=TENSOR_PARALLEL_SIZE)
    pipeline_parallel_size: int = Field(1, ge=1, le=MOST_RANKS, description=PIPELINE_PARALLEL_SIZE)
    reduction_parts: int | None = Field(None, ge=1, le=MOST_RANKS, description=REDUCTION_PARTS)
    turns_file: Path | None = Field(
        None,
        description="worker processes that have the same file take turns in stepping, with all cores",
    )
    max_itl: float | None = Field(None, ge=0, description=MAX_ITL)
    attention_backend: AttentionBackend = Field("auto", description="auto: fa3 if it is available, else triton")
    attention_library: str | None = Field(None, description="a shared library with FlashAttention-3's operators")
    deterministic: bool = Field(
        False, description="make a row's bits independent of its batch; on the CPU they always are"
    )
    enforce_eager: bool = Field(False, description="disable CUDA graphs")
    kv_cache_dtype: KvCacheDType = Field("auto", description=KV_CACHE_DTYPE)
    enable_lora: bool = Field(False, description="serve LoRA adapters; memory for --max-loras of them is set aside")
    max_loras: int = Field(8, ge=1, le=1024, description="maximum number of LoRA adapters that are loaded at a time")
    max_lora_rank: int = Field(16, ge=1, le=512, description="maximum rank of a LoRA adapter")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="share of a GPU's memory that may be used")
    seed: int = Field(0, ge=0, description="seed of dummy weights")
    drain_s: float = Field(10.0, ge=0, description="time in seconds that running requests have to finish after SIGTERM")
