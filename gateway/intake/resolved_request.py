"""Defines a request that has been checked: its prompt ids, its parameters, and the tenant to which it belongs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from common.adapters import AdapterRef
from common.types import CacheQuota, Pooling, SamplingParams, StoppingParams

Operation = Literal["chat", "text_completion", "embeddings"]
"""The kinds of requests, by their names in OpenTelemetry's conventions for generative AI."""


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """A client's request after validation: its fields have been checked, and all defaults are filled in."""

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    stopping: StoppingParams
    """The stopping parameters. The `stop_token_ids` include the model's end-of-sequence tokens unless the client has
    set `ignore_eos`.
    """
    timeout_s: float
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    salt: bytes = b""
    priority: int = 0
    prompt_text: str | None = None
    """The prompt's text, or None if the client sent token ids or the prompt was truncated."""
    shown_special: Mapping[int, str] = field(default_factory=dict)
    """The texts, by token id, of the special tokens that the output's text always includes."""
    skip_special_tokens: bool = True
    """Whether special tokens are left out of the output's text, except those in `shown_special`."""
    tenant: str = ""
    public_tokens: int = 0
    """Number of leading prompt tokens whose full blocks all tenants share."""
    pooling: Pooling | None = None
    """The method by which the prompt becomes an embedding, or None for a request that produces tokens."""
    cache_quota: CacheQuota | None = None
    """The tenant's limit on cached blocks, or None for no limit."""
    operation: Operation = "text_completion"
    """The kind of the request, for traces."""
    received_ns: int = field(default=0, compare=False)
    """When the request was read, in nanoseconds of `time.monotonic_ns`; 0 if that is not known."""

    adapter: AdapterRef | None = None
    """The adapter that the client has chosen by name, or None for the base model."""

    @property
    def adapter_digest(self) -> str:
        """The adapter's digest in hex, or "" for the base model."""
        return "" if self.adapter is None else self.adapter.digest

    @property
    def cost(self) -> int:
        """The largest number of tokens that the request can take, for fair shares: its prompt plus the outputs of all
        its sequences.
        """
        return len(self.prompt_ids) + self.sampling.width * self.stopping.max_tokens
