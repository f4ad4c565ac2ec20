"""The gateway's settings, as command-line flags and environment variables."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import Field

from common.settings import ServerSettings, VllmGrpcSettings, settings_config
from common.types import Pooling
from gateway.tools.names import CallFormatName, ReasoningFormatName


class GatewaySettings(VllmGrpcSettings, ServerSettings):
    """The flags of `python -m gateway`. The environment variables are LOOSELEAF_GATEWAY_*. Many flags have the names of
    vLLM's flags.
    """

    model_config = settings_config("LOOSELEAF_GATEWAY_", "gateway")

    model: str = Field(description="Hugging Face model directory; its weights are not needed here")
    served_model_name: str | None = Field(
        None, description="the model's name for clients; default: the directory's name"
    )
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
    port: int = Field(8000, ge=0, le=65535, description="HTTP port; 0: any free port")
    grpc_port: int = Field(50051, ge=0, le=65535, description="gRPC port; 0: any free port")
    reuse_port: bool = Field(
        False,
        description="share both ports with another gateway that also sets this: start the new one, then "
        "stop the old one",
    )
    redis_url: str = Field(
        description="the Redis server in which workers register (redis://, rediss://, unix:// or redis+sentinel://); "
        "if arenas have separate servers, all of them, separated by commas"
    )
    redis_password_file: Path | None = Field(
        None, description="a file with the password of the Redis server at --redis-url"
    )
    block_store: str | None = Field(
        None, description="host:port of the block store whose blocks /metrics shows; default: the stores of all arenas"
    )
    max_model_len: int | None = Field(
        None, ge=1, description="length of the longest sequence in tokens; default: the workers' limit"
    )
    max_queue: int = Field(
        256,
        ge=1,
        le=100_000,
        description="maximum number of sequences at once; further ones are refused with a retry time",
    )
    max_queue_wait: float = Field(
        10.0,
        ge=0,
        le=86_400,
        description="in seconds; a request is refused if its predicted wait for a place is longer",
    )
    request_timeout_s: float = Field(
        600.0,
        gt=0,
        le=86_400,
        description="time limit of a request in seconds: the maximum, and the default if the client gives none",
    )
    max_attempts: int = Field(
        3, ge=1, le=100, description="maximum number of times that a request is sent to workers if some are lost"
    )
    early_pull_tokens: int | None = Field(
        None,
        ge=0,
        description="if a prompt will be decoded on another host than it is prefilled on, its KV is copied while later "
        "tokens are computed, at least this many tokens at a time; 0: only after prefill; default: as many as take as "
        "long to copy as the fixed part of a copy",
    )
    recover_s: float = Field(
        30.0, ge=0, description="time in seconds that a request whose workers have been lost waits for other workers"
    )
    restarts_file: Path | None = Field(
        None,
        description="a file that exists while a launcher restarts a service; until it is removed, requests wait for "
        "workers, even for longer than --recover-s",
    )
    await_workers: bool = Field(
        False,
        description="an orchestrator such as Docker or Kubernetes restarts workers: while no pair of workers is ready, "
        "requests wait, even for longer than --recover-s",
    )
    expect_workers: int = Field(
        1, ge=1, description="number of workers that the gateway must know before it is ready for the first time"
    )
    disaggregation: Literal["auto", "never"] = Field(
        "auto",
        description="auto: predicted times decide for each request whether its prompt is computed in the process that "
        "decodes it or in another one; never: in the process that decodes it, so all workers must be in processes with "
        "both roles",
    )
    slo_ttft: float | None = Field(
        None, gt=0, description="limit in seconds on the time to first token, which routing tries to keep"
    )
    slo_itl: float | None = Field(
        None, gt=0, description="limit in seconds on a sequence's mean time between tokens, which routing tries to keep"
    )
    silence_s: float = Field(
        2.25, gt=0.5, description="a worker that sends nothing for this long, not even heartbeats, counts as lost"
    )
    stall_s: float = Field(
        60.0, gt=0, description="a decode worker that has sequences but completes no step for this long counts as lost"
    )
    poll_s: float = Field(0.25, gt=0.01, le=10, description="interval in seconds between polls of the list of workers")
    num_tokenizer_threads: int = Field(2, ge=1, le=64, description="number of threads for long prompts")
    ssl_certfile: Path | None = Field(None, description="certificate (PEM) for HTTPS and gRPC with clients")
    ssl_keyfile: Path | None = Field(None, description="private key of that certificate")
    api_key: str | None = Field(
        None, min_length=1, repr=False, description="key that clients must send as a bearer token"
    )
    api_key_file: str | None = Field(None, description='a file with one line "TENANT KEY" for each accepted key')
    public_prefix_file: str | None = Field(
        None,
        description="a file with a JSON array of texts and beginnings of conversations whose KV blocks "
        "all tenants share",
    )
    salt_secret: str | None = Field(
        None,
        min_length=8,
        repr=False,
        description="secret from which cache salts are derived; must be the same for all gateways",
    )
    enable_lora: bool = Field(False, description="serve LoRA adapters, which clients choose as their model")
    lora_modules: list[str] = Field(
        [], description="adapters to load at startup, name=path; may be given several times, or separated by commas"
    )
    allow_runtime_lora_updating: bool = Field(
        False, description="let the operator load and unload adapters over HTTP while requests run"
    )
    metrics: bool = Field(True, description="serve /metrics and /load")
    explain_requests: int = Field(
        1000,
        ge=0,
        le=100_000,
        description="number of requests, of all tenants, that are kept for /v1/explain and Explain; 0: none",
    )
    ui: bool = Field(True, description="serve the page at /")
    strict_fields: bool = Field(
        False, description="refuse unknown fields of request bodies instead of ignoring them with a warning"
    )
    allowed_origins: str | None = Field(
        None, description="origins whose pages may call the HTTP API, separated by commas; *: any; default: none"
    )
    drain_delay: float = Field(
        1.0,
        ge=0,
        le=3600,
        description="seconds after SIGTERM during which the health checks fail but new requests are still accepted",
    )
    drain_s: float = Field(10.0, ge=0, description="time in seconds that running requests have to finish after SIGTERM")
    max_connections: int = Field(
        4096, ge=1, description="maximum number of connections at once, for HTTP and gRPC separately"
    )
    max_header_bytes: int = Field(
        65_536, ge=1024, le=1 << 20, description="maximum size in bytes of the request line and headers"
    )
    header_timeout_s: float = Field(10.0, gt=0, description="time in seconds for a request's headers to arrive")
    keep_alive_s: int = Field(
        75, ge=1, description="time in seconds for which a connection may be idle between requests"
    )
    body_budget_bytes: int = Field(
        32 << 20,
        ge=16 << 20,
        description="maximum size in bytes of all HTTP bodies that are being received or parsed",
    )
    max_concurrent_rpcs: int = Field(
        4096, ge=1, description="maximum number of gRPC calls at once; further calls are refused"
    )
    wrong_keys_per_minute: int = Field(
        60,
        ge=0,
        description="number of wrong API keys that an address may try per minute, and in one burst; 0: no limit",
    )


def split_urls(urls: str) -> list[str]:
    """Returns the URLs of a comma-separated list. A comma separates two URLs only if a scheme and `://` follow it."""
    return re.split(r",(?=[a-z+]+://)", urls)
