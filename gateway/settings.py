"""The gateway's flags and variables."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from common.settings import ServerSettings, settings_config
from gateway.tools.formats import CallFormatName, ReasoningFormatName


class GatewaySettings(ServerSettings):
    """Settings from `python -m gateway --flags` or LOOSELEAF_GATEWAY_* variables. A setting that vLLM also has is named
    as in vLLM.
    """

    model_config = settings_config("LOOSELEAF_GATEWAY_", "gateway")

    model: str = Field(description="Hugging Face model directory; its weights are not needed here")
    served_model_name: str | None = Field(None, description="the model's name for clients; default: the directory's")
    tool_call_parser: CallFormatName = Field(
        "auto", description="how the model writes tool calls; auto: as its chat template says"
    )
    reasoning_parser: ReasoningFormatName | None = Field(
        None, description="how the model marks its reasoning, which is then split off; default: it is not"
    )
    port: int = Field(8000, ge=0, le=65535, description="HTTP port; 0: any free one")
    grpc_port: int = Field(50051, ge=0, le=65535, description="gRPC port; 0: any free one")
    reuse_port: bool = Field(
        False, description="share both ports with a gateway that says so too: start the new one, then end the old one"
    )
    redis_url: str = Field(description="the Redis in which workers register")
    redis_password_file: Path | None = Field(None, description="a file with the password of the Redis at --redis-url")
    block_store: str | None = Field(None, description="host:port of a block store, to show block states in /metrics")
    max_model_len: int | None = Field(None, ge=1, description="longest sequence in tokens; default: the workers'")
    max_queue: int = Field(
        256, ge=1, le=100_000, description="most sequences at once; more are refused with a retry time"
    )
    max_queue_wait: float = Field(
        10.0, ge=0, le=86_400, description="seconds; a request is refused whose wait for a place is predicted longer"
    )
    request_timeout_s: float = Field(
        600.0, gt=0, le=86_400, description="time of a request whose client gave none, and the most"
    )
    max_attempts: int = Field(
        3, ge=1, le=100, description="how often a request may be sent to workers when some are lost"
    )
    recover_s: float = Field(30.0, ge=0, description="how long a request whose workers are lost waits for others")
    silence_s: float = Field(
        2.25, gt=0.5, description="a worker that sends nothing for so long, not even heartbeats, is given up"
    )
    stall_s: float = Field(
        60.0, gt=0, description="a decode worker with sequences that makes no step for so long is given up"
    )
    poll_s: float = Field(0.25, gt=0.01, le=10, description="how often to look for workers")
    num_tokenizer_threads: int = Field(2, ge=1, le=64, description="threads for long prompts")
    ssl_certfile: Path | None = Field(None, description="certificate (PEM) for HTTPS and for gRPC in front")
    ssl_keyfile: Path | None = Field(None, description="its private key")
    api_key: str | None = Field(None, min_length=1, repr=False, description="clients must send it as a bearer token")
    api_key_file: str | None = Field(None, description='a file with a line "TENANT KEY" for each key that is accepted')
    public_prefix_file: str | None = Field(
        None, description="a JSON array of texts and beginnings of conversations whose KV blocks all tenants share"
    )
    salt_secret: str | None = Field(
        None, min_length=8, repr=False, description="secret from which cache salts derive; the same in all gateways"
    )
    metrics: bool = Field(True, description="serve /metrics and /load")
    strict_fields: bool = Field(
        False, description="refuse fields of request bodies that nobody knows; else they are ignored with a warning"
    )
    allowed_origins: str | None = Field(
        None, description="origins whose pages may call the HTTP API, with commas; *: any; default: none"
    )
    drain_delay: float = Field(
        1.0, ge=0, le=3600, description="seconds at SIGTERM in which health says no and new requests are still taken"
    )
    drain_s: float = Field(10.0, ge=0, description="most seconds that running requests get at SIGTERM")
    max_connections: int = Field(4096, ge=1, description="most connections at once, of HTTP and of gRPC each")
    max_header_bytes: int = Field(65_536, ge=1024, le=1 << 20, description="most bytes of a request line and headers")
    header_timeout_s: float = Field(10.0, gt=0, description="time for a request's headers to arrive")
    keep_alive_s: int = Field(75, ge=1, description="how long a connection may be idle between requests")
    body_budget_bytes: int = Field(
        32 << 20, ge=16 << 20, description="most bytes of all HTTP bodies that are received and not yet parsed"
    )
    max_concurrent_rpcs: int = Field(4096, ge=1, description="most gRPC calls at once; more are refused")
    wrong_keys_per_minute: int = Field(
        60, ge=0, description="wrong API keys that an address may try in a minute, and at once; 0: no limit"
    )
