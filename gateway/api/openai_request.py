"""The base class of all HTTP request bodies, and the bodies of completions, chats, /tokenize and /detokenize, with the
fields of OpenAI's API and vLLM's.

`openai_parse` builds the bodies from bytes and handles unknown fields. Fields that cannot change the answer (`user`,
`store`, ...) are accepted and ignored. Unsupported fields that could change the answer are refused, unless they have
their neutral value, which has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from common.errors import InvalidArgument
from gateway.api.chat_fields import CALL_NEEDS_TOOLS, TEMPLATE_RULES, chat_prompt
from gateway.api.chat_messages import MessageBody
from gateway.api.field_rules import Rule, equals, excludes, given, needs
from gateway.api.structured_fields import NOT_GIVEN, STRUCTURED_FIELDS, ResponseFormat, StructuredOutputs, structured_of
from gateway.api.vllm_fields import UNSUPPORTED
from gateway.intake.limits import MAX_ID_DIGITS
from gateway.intake.wanted import IdsPrompt, Prompt, TextPrompt, Wanted


class Body(msgspec.Struct, kw_only=True):
    """The base class of request bodies. Types are strict, as in JSON: a string is not accepted as a number."""

    ignored: ClassVar[frozenset[str]] = frozenset()
    unsupported: ClassVar[Mapping[str, Any]] = {}
    """Known but unsupported fields, each with its neutral value."""
    rules: ClassVar[tuple[Rule, ...]] = ()
    """Rules between the fields."""

    model: str | None = None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """vLLM's field. If `include_usage` is also true, every chunk has the usage so far."""
    include_obfuscation: bool | None = None


class SamplingBody(Body, kw_only=True):
    """The base class of completion and chat bodies, with the fields that they share."""

    ignored = frozenset(
        (
            "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key",
            "prompt_cache_retention", "parallel_tool_calls", "verbosity", "guided_decoding_backend",
        )
    )  # fmt: skip
    unsupported = {
        "tools": [], "tool_choice": "none", "functions": [], "function_call": "none",
        "suffix": "", "modalities": ["text"], "audio": None, "prediction": None,
        "web_search_options": None, "reasoning_effort": None,
        **UNSUPPORTED,
    }  # fmt: skip
    rules: ClassVar[tuple[Rule, ...]] = (
        needs("stream_options", "stream"),
        Rule("cannot be combined with stream", (given("prompt_logprobs"), equals("stream", True))),
    )

    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    best_of: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # vLLM's fields
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    request_id: str | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | int | float | str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: msgspec.Raw = NOT_GIVEN
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def field_names(self) -> dict[str, str]:
        """The client's names for fields of `Wanted` that have different names there."""
        return {}

    def wanted(self) -> Wanted:
        """Returns a request with the fields that completions and chats share. Raises InvalidArgument if a field is
        invalid.
        """
        wanted = Wanted(stop=[self.stop] if isinstance(self.stop, str) else self.stop or ())
        for name in _PLAIN:
            setattr(wanted, name, getattr(self, name))
        wanted.logit_bias = logit_bias_of(self.logit_bias or {})
        wanted.stop_token_ids = self.stop_token_ids or ()
        wanted.bad_words = self.bad_words or ()
        wanted.allowed_token_ids = self.allowed_token_ids
        wanted.use_beam_search = bool(self.use_beam_search)
        wanted.skip_special_tokens = self.skip_special_tokens is not False
        wanted.ignore_eos = bool(self.ignore_eos)
        wanted.include_stop_str_in_output = bool(self.include_stop_str_in_output)
        if found := structured_of({name: getattr(self, name) for name in STRUCTURED_FIELDS}):
            wanted.structured_field, wanted.structured = found
        return wanted


_PLAIN = (
    "model", "request_id", "temperature", "top_p", "n", "best_of", "seed", "max_tokens", "presence_penalty",
    "frequency_penalty", "top_k", "min_p", "repetition_penalty", "min_tokens", "prompt_logprobs", "add_special_tokens",
    "cache_salt", "priority", "length_penalty", "early_stopping", "truncate_prompt_tokens",
)  # fmt: skip


class CompletionBody(SamplingBody, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: Sequence[TextPrompt | IdsPrompt]
    """The prompts. Clients send a string, a list of strings, a list of token ids, or a list of lists of token ids."""
    echo: bool | None = None
    logprobs: int | None = None

    @property
    def scores_only(self) -> bool:
        """Whether the answer consists only of the prompt and its log-probabilities: `echo` with `max_tokens` 0."""
        return bool(self.echo) and self.max_tokens == 0

    def all_wanted(self) -> list[Wanted]:
        """Returns one request per prompt. Raises InvalidArgument if a field is invalid."""
        wanted = [self.wanted() for _ in self.prompt]
        for index, (item, prompt) in enumerate(zip(wanted, self.prompt, strict=True)):
            item.prompt = prompt
            item.prompt_field = "prompt" if len(self.prompt) == 1 else f"prompt[{index}]"
            item.logprobs = self.logprobs
            if self.echo and self.logprobs is not None:
                item.prompt_logprobs = max(self.logprobs, self.prompt_logprobs or 0)
            if self.scores_only:
                item.max_tokens = 1  # a worker always samples one token; the answer omits it
        return wanted


class ChatBody(SamplingBody, kw_only=True):
    """The body of POST /v1/chat/completions."""

    rules = (
        *SamplingBody.rules,
        *TEMPLATE_RULES,
        CALL_NEEDS_TOOLS,
        needs("top_logprobs", "logprobs"),
        excludes("max_completion_tokens", "max_tokens", "and max_tokens are the same; give one of them"),
    )

    messages: list[MessageBody]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def field_names(self) -> dict[str, str]:
        given = {} if self.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
        return {"logprobs": "top_logprobs", **given}

    def all_wanted(self) -> list[Wanted]:
        wanted = self.wanted()
        wanted.prompt, wanted.prompt_field = chat_prompt(self, self.messages, self.reasoning_effort), "messages"
        if self.max_completion_tokens is not None:
            wanted.max_tokens = self.max_completion_tokens
        wanted.logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return [wanted]


class TokenizeBody(Body, kw_only=True):
    """The body of POST /tokenize."""

    rules = (*TEMPLATE_RULES, excludes("messages", "prompt"))

    prompt: str | None = None
    messages: list[MessageBody] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None
    add_special_tokens: bool | None = None

    def input(self) -> tuple[str, Prompt | None]:
        if self.messages is not None:
            return "messages", chat_prompt(self, self.messages)
        return "prompt", None if self.prompt is None else TextPrompt(self.prompt)


class DetokenizeBody(Body, kw_only=True):
    """The body of POST /detokenize."""

    tokens: list[int]


def logit_bias_of(given: dict[str, float]) -> list[tuple[int, float]]:
    bias = []
    for key, value in given.items():
        if not key.isascii() or not key.isdigit() or len(key) > MAX_ID_DIGITS:
            raise InvalidArgument.of("logit_bias", f"must have token ids as keys, got {key[:20]!r}")
        bias.append((int(key), float(value)))
    return bias
