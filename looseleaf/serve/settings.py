"""Settings of `looseleaf serve` and of `LLM`. A flag that vLLM also has is named as in vLLM."""

from __future__ import annotations

from typing import Literal

from pydantic import ByteSize, Field
from pydantic_settings import CliPositionalArg

from common.settings import AttentionBackend, Settings, settings_config


class ServeSettings(Settings):
    """Serves a model on this machine: block store, prefill and decode workers, and the gateway.

    Services also read their own variables (LOOSELEAF_GATEWAY_*, LOOSELEAF_PREFILL_*, LOOSELEAF_DECODE_*,
    LOOSELEAF_WORKER_*, LOOSELEAF_BLOCK_STORE_*). A flag given here overrides them.
    """

    model_config = settings_config("LOOSELEAF_SERVE_", "looseleaf serve")

    model_directory: CliPositionalArg[str | None] = Field(
        None, description="Hugging Face model directory; default: the built-in model"
    )
    model: str | None = Field(None, description="the same as a flag")
    served_model_name: str | None = Field(None, description="name in the API; default: the directory's name")
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral", "json"] = Field(
        "auto", description="how the model writes tool calls; auto: as its chat template says"
    )
    reasoning_parser: Literal["qwen3", "deepseek_r1"] | None = Field(
        None, description="how the model marks its reasoning, which is then split off; default: it is not"
    )
    roles: Literal["auto", "both", "split"] = Field(
        "auto", description="both: prefill and decode in one process; auto: both on a GPU or below 8 cores, else split"
    )
    prefill: int = Field(1, ge=1, le=64, description="prefill workers; with roles both as many as decode")
    decode: int = Field(1, ge=1, le=64, description="decode workers; with roles both as many as prefill")
    spare: int | None = Field(
        None,
        ge=0,
        le=1,
        description="workers loaded ahead, for one that dies; default: 1 where memory is free for it",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where torch can use a GPU")
    threads: int = Field(
        0,
        ge=0,
        le=1024,
        description="threads of each worker; 0: OMP_NUM_THREADS, else an even share of the cores, below 8 of each role",
    )
    host: str = Field("127.0.0.1", description="where the gateway listens")
    port: int = Field(8000, ge=0, le=65535, description="HTTP port; 0: any free one")
    grpc_port: int = Field(50051, ge=0, le=65535, description="gRPC port; 0: any free one")
    dtype: Literal["auto", "bfloat16", "float32", "float16"] = Field("auto", description="float16 only on a GPU")
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    model_impl: Literal["auto", "native", "transformers"] = Field(
        "auto", description="whose model definition is run; auto: ours where there is one, else that of transformers"
    )
    quantization: Literal["int8", "int4"] | None = Field(
        None, description="round the weights of linear layers to 8 or 4 bits; default: as the checkpoint has them"
    )
    allow_variant_numerics: bool = Field(
        False,
        description="serve a model whose rows depend on their batch, so that tokens may differ by load",
    )
    max_model_len: int | None = Field(None, ge=1, description="longest sequence in tokens; default: the model's")
    block_size: int = Field(16, ge=1, le=256, description="token positions in a block")
    max_num_seqs: int = Field(64, ge=1, le=4096, description="most sequences in a step")
    max_num_batched_tokens: int = Field(512, ge=1, le=1 << 20, description="most tokens in a step")
    max_queue: int | None = Field(None, ge=1, description="most sequences admitted at once; default: the gateway's")
    max_queue_wait: float | None = Field(
        None, ge=0, description="seconds; a longer predicted wait is refused; default: the gateway's"
    )
    preemption: Literal["auto", "swap", "give-back"] | None = Field(
        None, description="what becomes of requests whose blocks others need; default: the decode worker's"
    )
    swap_space: float | None = Field(
        None, ge=0, description="GiB of host memory for swapped blocks; default: the decode worker's"
    )
    attention_backend: AttentionBackend = Field("auto", description="provider of attention kernels")
    attention_library: str | None = Field(None, description="a shared library with FlashAttention-3's operators")
    deterministic: bool = Field(False, description="bits of a row do not depend on its batch; always so on the CPU")
    enforce_eager: bool = Field(False, description="no CUDA graphs")
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = Field("auto", description="auto: the model's; fp8_e4m3 on a GPU")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="share of a GPU's memory that we may fill")
    seed: int = Field(0, ge=0, description="seed of dummy weights")
    memory_budget: ByteSize | None = Field(
        None,
        ge=1,
        description="bytes (or 4GiB, 512MiB) for weights, activations and KV; default: the block store's choice",
    )
    num_blocks: int | None = Field(None, ge=1, description="KV blocks, instead of a memory budget")
    directory: str | None = Field(None, description="shared-memory directory for the arena; default: below /dev/shm")
    redis_url: str | None = Field(None, description="a Redis of its own; default: a private redis-server is started")
    api_key: str | None = Field(None, repr=False, description="credential that clients must present (or by variable)")
    api_key_file: str | None = Field(None, description='a file with a line "TENANT KEY" for each key that is accepted')
    public_prefix_file: str | None = Field(
        None, description="a JSON array of texts and beginnings of conversations whose KV blocks all tenants share"
    )
    ssl_certfile: str | None = Field(None, description="certificate (PEM) for HTTPS and for gRPC in front")
    ssl_keyfile: str | None = Field(None, description="its private key")
    tls_cert: str | None = Field(None, description="certificate of all services for internal calls (PEM)")
    tls_key: str | None = Field(None, description="its private key")
    tls_ca: str | None = Field(None, description="the CA of all services: they speak TLS and check each other")
    reflection: bool = Field(True, description="tell callers which gRPC methods and HTTP paths there are")
    strict_fields: bool = Field(
        False, description="refuse fields of request bodies that nobody knows; else they are ignored with a warning"
    )
    allowed_origins: str | None = Field(
        None, description="origins whose pages may call the HTTP API, with commas; *: any; default: none"
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    startup_timeout_s: float = Field(600.0, gt=0, description="most seconds until all services are ready")
    drain_delay: float = Field(
        0.0, ge=0, le=3600, description="seconds at the end in which health says no and new requests are still taken"
    )
    grace_s: float = Field(10.0, ge=0, description="seconds that requests in flight get at the end")
