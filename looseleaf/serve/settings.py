"""Settings of `looseleaf serve` and of `LLM`. A flag that vLLM also has keeps vLLM's name."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import ByteSize, Field
from pydantic_settings import BaseSettings, CliPositionalArg, PydanticBaseSettingsSource

from common.settings import (
    BLOCK_SIZE,
    KV_CACHE_DTYPE,
    KV_DISK_DIR,
    LOG_FORMAT,
    MAX_ITL,
    PIPELINE_PARALLEL_SIZE,
    REDUCTION_PARTS,
    TENSOR_PARALLEL_SIZE,
    AttentionBackend,
    VllmGrpcSettings,
    settings_config,
)
from common.speculative_config import SPECULATIVE_CONFIG, SpeculativeConfigText
from common.telemetry import LogFormat
from common.tensor_parallel import MOST_RANKS
from common.types import KvCacheDType, Pooling
from gateway.tools.names import CallFormatName, ReasoningFormatName
from looseleaf.serve.service_variables import ServiceVariables


class ServeSettings(VllmGrpcSettings):
    """Flags of `looseleaf serve`, which runs a block store, prefill and decode workers and a gateway on this machine.

    A flag or variable of `serve` overrides the services' own variables (LOOSELEAF_GATEWAY_*, LOOSELEAF_PREFILL_*,
    LOOSELEAF_DECODE_*, LOOSELEAF_WORKER_*, LOOSELEAF_BLOCK_STORE_*), and these override the defaults of `serve`.

    With --ray, the services run on the nodes of a Ray cluster. --ray --help shows the flags for this.
    """

    model_config = settings_config("LOOSELEAF_SERVE_", "looseleaf serve")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, ServiceVariables(settings_cls)

    model_directory: CliPositionalArg[str | None] = Field(
        None, description="Hugging Face model directory; default: the built-in model"
    )
    model: str | None = Field(None, description="the same, given as a flag")
    served_model_name: str | None = Field(None, description="name in the API; default: the directory's name")
    pooling: Pooling = Field(
        "last", description="how a text's hidden states become its embedding: the last token's, or the mean of all"
    )
    tool_call_parser: CallFormatName = Field(
        "auto", description="how the model writes tool calls; auto: as its chat template says"
    )
    reasoning_parser: ReasoningFormatName | None = Field(
        None,
        description="format of the reasoning, which is then split off from the content; default: it is not split off",
    )
    roles: Literal["auto", "both", "split", "adaptive"] = Field(
        "auto",
        description="both: each process has both roles, and decodes the prompts that it computes; split: each process "
        "has one role; adaptive: each process has both roles, and for each request, the gateway decides whether one "
        "process or two work on it; auto: if the numbers of workers allow it, both on a GPU or with fewer than 8 "
        "cores, else split",
    )
    prefill: int = Field(
        1, ge=1, le=64, description="number of prefill workers; with --roles both or adaptive, the same as for decode"
    )
    decode: int = Field(
        1, ge=1, le=64, description="number of decode workers; with --roles both or adaptive, the same as for prefill"
    )
    slo_ttft: float | None = Field(
        None, gt=0, description="limit in seconds on the time to first token, which routing tries to keep"
    )
    slo_itl: float | None = Field(
        None, gt=0, description="limit in seconds on a sequence's mean time between tokens, which routing tries to keep"
    )
    spare: int | None = Field(
        None,
        ge=0,
        le=1,
        description="number of spare workers, loaded in advance to replace one that dies; default: 1 on a CPU with "
        "enough free memory",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda if torch can use a GPU")
    threads: int = Field(
        0,
        ge=0,
        le=1024,
        description="number of threads per worker; 0: OMP_NUM_THREADS, else an even share of the cores (with fewer "
        "than 8 cores, of all cores for each role)",
    )
    tensor_parallel_size: int = Field(1, ge=1, le=MOST_RANKS, description=TENSOR_PARALLEL_SIZE)
    prefill_tensor_parallel_size: int | None = Field(
        None, ge=1, le=MOST_RANKS, description="the same for prefill workers only; needs --roles split"
    )
    decode_tensor_parallel_size: int | None = Field(
        None, ge=1, le=MOST_RANKS, description="the same for decode workers only; needs --roles split"
    )
    pipeline_parallel_size: int = Field(1, ge=1, le=MOST_RANKS, description=PIPELINE_PARALLEL_SIZE)
    prefill_pipeline_parallel_size: int | None = Field(
        None, ge=1, le=MOST_RANKS, description="the same for prefill workers only; needs --roles split"
    )
    decode_pipeline_parallel_size: int | None = Field(
        None, ge=1, le=MOST_RANKS, description="the same for decode workers only; needs --roles split"
    )
    reduction_parts: int | None = Field(None, ge=1, le=MOST_RANKS, description=REDUCTION_PARTS)
    host: str = Field("127.0.0.1", description="where the gateway listens")
    port: int = Field(8000, ge=0, le=65535, description="HTTP port; 0: any free port")
    grpc_port: int = Field(50051, ge=0, le=65535, description="gRPC port; 0: any free port")
    dtype: Literal["auto", "bfloat16", "float32", "float16"] = Field("auto", description="float16 only on a GPU")
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
    max_itl: float | None = Field(None, ge=0, description=MAX_ITL)
    max_queue: int | None = Field(
        None, ge=1, description="maximum number of sequences admitted at once; default: the gateway's"
    )
    max_queue_wait: float | None = Field(
        None, ge=0, description="in seconds; a request with a longer predicted wait is refused; default: the gateway's"
    )
    preemption: Literal["auto", "swap", "give-back"] | None = Field(
        None, description="what happens to requests whose blocks others need; default: the decode worker's"
    )
    swap_space: float | None = Field(
        None, ge=0, description="GiB of host memory for swapped blocks; default: the decode worker's"
    )
    speculative_config: SpeculativeConfigText = Field(None, description=SPECULATIVE_CONFIG)
    attention_backend: AttentionBackend = Field("auto", description="provider of attention kernels")
    attention_library: str | None = Field(None, description="a shared library with FlashAttention-3's operators")
    deterministic: bool = Field(
        False, description="make a row's bits independent of its batch; on the CPU they always are"
    )
    enforce_eager: bool = Field(False, description="disable CUDA graphs")
    kv_cache_dtype: KvCacheDType = Field("auto", description=KV_CACHE_DTYPE)
    enable_lora: bool = Field(False, description="serve LoRA adapters, which clients choose as their model")
    lora_modules: list[str] = Field(
        [], description="adapters to load at startup, name=path; may be given several times, or separated by commas"
    )
    max_loras: int = Field(8, ge=1, le=1024, description="maximum number of LoRA adapters that are loaded at a time")
    max_lora_rank: int = Field(16, ge=1, le=512, description="maximum rank of a LoRA adapter")
    allow_runtime_lora_updating: bool = Field(
        False, description="let the operator load and unload adapters over HTTP while requests run"
    )
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="share of a GPU's memory that may be used")
    seed: int = Field(0, ge=0, description="seed of dummy weights")
    memory_budget: ByteSize | None = Field(
        None,
        ge=1,
        description="memory for weights, activations and KV, in bytes or as 4GiB, 512MiB; default: the "
        "block store's choice",
    )
    num_blocks: int | None = Field(
        None, ge=1, description="number of blocks in the arena, of all KV groups together, instead of a memory budget"
    )
    kv_disk: ByteSize | None = Field(
        None,
        gt=0,
        description="disk space for copies of KV blocks, such as 20GiB, for each KV layout separately; they survive a "
        "restart; default: none",
    )
    kv_disk_dir: Path = Field(KV_DISK_DIR, description="directory for these copies")
    directory: str | None = Field(None, description="shared-memory directory for the arena; default: below /dev/shm")
    redis_url: str | None = Field(
        None,
        description="URL of the Redis server (redis://, rediss://, unix:// or redis+sentinel://); default: a private "
        "redis-server is started",
    )
    api_key: str | None = Field(None, repr=False, description="API key that clients must send (or use the variable)")
    api_key_file: str | None = Field(None, description='a file with one line "TENANT KEY" for each accepted key')
    public_prefix_file: str | None = Field(
        None,
        description="a file with a JSON array of texts and beginnings of conversations whose KV blocks "
        "all tenants share",
    )
    ssl_certfile: str | None = Field(None, description="certificate (PEM) for HTTPS and gRPC with clients")
    ssl_keyfile: str | None = Field(None, description="private key of that certificate")
    tls_cert: str | None = Field(None, description="certificate of all services for internal calls (PEM)")
    tls_key: str | None = Field(None, description="private key of that certificate")
    tls_ca: str | None = Field(
        None, description="the CA of all services; with it, services use TLS and verify each other"
    )
    reflection: bool = Field(True, description="let callers list the gRPC methods and HTTP paths")
    explain_requests: int | None = Field(
        None, ge=0, description="number of requests that are kept for `looseleaf explain`; default: the gateway's"
    )
    ui: bool = Field(True, description="serve the page at /")
    strict_fields: bool = Field(
        False, description="refuse unknown fields of request bodies instead of ignoring them with a warning"
    )
    allowed_origins: str | None = Field(
        None, description="origins whose pages may call the HTTP API, separated by commas; *: any; default: none"
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    log_format: LogFormat = Field("text", description=LOG_FORMAT)
    startup_timeout_s: float = Field(600.0, gt=0, description="maximum time in seconds until all services are ready")
    drain_delay: float = Field(
        0.0,
        ge=0,
        le=3600,
        description="seconds after SIGTERM during which the health checks fail but new requests are still accepted",
    )
    grace_s: float = Field(10.0, ge=0, description="time in seconds that running requests have to finish at shutdown")
