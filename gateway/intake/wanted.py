"""A request in the client's terms, with only its types checked. The gRPC and HTTP interfaces fill it in."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.types import EarlyStopping, StructuredOutput
from gateway.intake.resolved_request import Operation


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, slots=True)
class IdsPrompt:
    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: Sequence[Mapping[str, Any]]
    """Messages as chat templates expect them: role, content (a string or None), tool_calls, ..."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """Tools as OpenAI's API describes them."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Additional variables for the template."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """Whether the output continues the last message instead of beginning an answer."""
    names: Sequence[str] | None = None
    """The names of the messages' fields in the body, for error messages. None means `messages[i]`."""


Prompt = TextPrompt | IdsPrompt | ChatPrompt


@dataclass(slots=True)
class Wanted:
    """A client's request before validation: only its types have been checked. None means "not given"."""

    prompt: Prompt | None = None
    prompt_field: str = "prompt"
    request_id: str | None = None
    model: str | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Sequence[tuple[int, float]] = ()
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int | None = None
    best_of: int | None = None
    beam_width: int | None = None
    use_beam_search: bool = False
    """Whether HTTP requested a beam search, with best_of or n beams. gRPC sets `beam_width` instead."""
    length_penalty: float | None = None
    early_stopping: EarlyStopping | None = None
    bad_words: Sequence[str] = ()
    bad_token_ids: Sequence[Sequence[int]] = ()
    """The tokens of `bad_words`. The validator fills them in."""
    allowed_token_ids: Sequence[int] | None = None
    structured: StructuredOutput | None = None
    structured_field: str = "structured_output"
    """The name of the client's field that requests `structured`, for errors."""
    structured_after: Callable[[str], StructuredOutput] | None = None
    """A function that returns `structured` for the prompt's text, or None if `structured` does not depend on the
    prompt.
    """
    shown_special: Mapping[int, str] = field(default_factory=dict)
    """The texts, by token id, of the special tokens that the output's text always includes."""
    max_tokens: int | None = None
    fills_context: bool = False
    """Whether the default of `max_tokens` is the rest of the context, as it is for a chat."""
    min_tokens: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    add_special_tokens: bool | None = None
    skip_special_tokens: bool = True
    """Whether special tokens are left out of the output's text, except those in `shown_special`."""
    truncate_prompt_tokens: int | None = None
    """The number of tokens to keep at the end of the prompt. -1 keeps as many as leave room for the output."""
    embeds: bool = False
    """Whether the request asks for the prompt's embedding instead of tokens."""
    cache_salt: str | None = None
    priority: int | None = None
    timeout_s: float | None = None
    received_ns: int = field(default_factory=time.monotonic_ns, compare=False)
    """When the request was read, in nanoseconds of `time.monotonic_ns`."""

    @property
    def operation(self) -> Operation:
        """The kind of the request, for traces."""
        if self.embeds:
            return "embeddings"
        return "chat" if isinstance(self.prompt, ChatPrompt) else "text_completion"
