"""Bodies of OpenAI's HTTP API, with vLLM's extras. Parsed once a request; unknown fields are refused by name.

Fields that cannot change the answer (`user`, `store`, ...) are accepted and ignored; fields that would change it and
are not supported are refused as such, unless their value asks for nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from common.errors import FieldViolation, InvalidArgument, Unimplemented
from gateway.limits import MAX_BATCH_PROMPTS
from gateway.validate import ChatPrompt, IdsPrompt, Prompt, TextPrompt, Wanted

M = TypeVar("M", bound="Body")
_UNSUPPORTED = {
    "tools": [], "tool_choice": "none", "functions": [], "function_call": "none", "response_format": {"type": "text"},
    "suffix": "", "modalities": ["text"], "audio": None, "prediction": None, "web_search_options": None,
    "reasoning_effort": None,
}  # fmt: skip
"""Known fields that are not supported, each with the value that asks for nothing."""


class Body(BaseModel):
    """Types are strict, as JSON has them: no numbers in strings."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SamplingBody(Body):
    """What completions and chat have in common."""

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
    # vLLM's
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
    early_stopping: Any = None
    # cannot change the answer
    user: Any = None
    store: Any = None
    metadata: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    parallel_tool_calls: Any = None
    verbosity: Any = None
    # would change it
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    suffix: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    reasoning_effort: Any = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def wanted(self) -> Wanted:
        """All but the prompt. Unimplemented for a field that is not supported."""
        for name, nothing in _UNSUPPORTED.items():
            if getattr(self, name) not in (None, nothing):
                raise Unimplemented(f"{name} is not supported yet")
        if self.stream_options is not None and not self.stream:
            raise InvalidArgument.of("stream_options", "may only be given together with stream")
        wanted = Wanted(stop=[self.stop] if isinstance(self.stop, str) else self.stop or ())
        for name in _PLAIN:
            setattr(wanted, name, getattr(self, name))
        wanted.logit_bias = _logit_bias(self.logit_bias or {})
        wanted.stop_token_ids = self.stop_token_ids or ()
        wanted.use_beam_search = bool(self.use_beam_search)
        wanted.ignore_eos = bool(self.ignore_eos)
        wanted.include_stop_str_in_output = bool(self.include_stop_str_in_output)
        return wanted


_PLAIN = (
    "model", "request_id", "temperature", "top_p", "n", "best_of", "seed", "max_tokens", "presence_penalty",
    "frequency_penalty", "top_k", "min_p", "repetition_penalty", "min_tokens", "prompt_logprobs", "add_special_tokens",
    "cache_salt", "priority", "length_penalty", "early_stopping",
)  # fmt: skip


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: Any = None
    echo: bool | None = None
    logprobs: int | None = None

    @property
    def scores_only(self) -> bool:
        """`echo` with max_tokens 0: the prompt's log-probabilities and nothing new."""
        return bool(self.echo) and self.max_tokens == 0

    def all_wanted(self) -> list[Wanted]:
        """One request per prompt."""
        prompts = _prompts(self.prompt)
        wanted = [self.wanted() for _ in prompts]
        for index, (item, prompt) in enumerate(zip(wanted, prompts, strict=True)):
            item.prompt = prompt
            item.prompt_field = "prompt" if len(prompts) == 1 else f"prompt[{index}]"
            item.logprobs = self.logprobs
            if self.echo and self.logprobs is not None:
                item.prompt_logprobs = self.logprobs
            if self.scores_only:
                item.max_tokens = 1  # a worker always draws one; it is not shown
        return wanted


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: str
    text: str


class MessageBody(BaseModel):
    """One message. What clients copy from an answer (`refusal: null`, ...) is accepted while it says nothing."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: str
    content: str | list[TextPart]
    name: str | None = None
    refusal: None = None
    annotations: list[None] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[None] | None = None

    def plain(self) -> dict[str, str]:
        if isinstance(self.content, str):
            return {"role": self.role, "content": self.content}
        return {"role": self.role, "content": "".join(part.text for part in self.content)}


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    messages: list[MessageBody]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def all_wanted(self) -> list[Wanted]:
        wanted = self.wanted()
        wanted.prompt, wanted.prompt_field = chat_prompt(self.messages), "messages"
        if self.max_completion_tokens is not None:
            if self.max_tokens is not None:
                raise InvalidArgument.of("max_completion_tokens", "and max_tokens are the same; give one of them")
            wanted.max_tokens = self.max_completion_tokens
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidArgument.of("top_logprobs", "needs logprobs to be true")
        wanted.logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return [wanted]


class TokenizeBody(Body):
    """POST /tokenize."""

    prompt: str | None = None
    messages: list[MessageBody] | None = None
    add_special_tokens: bool | None = None

    def input(self) -> tuple[str, Prompt | None]:
        if self.messages is not None and self.prompt is not None:
            raise InvalidArgument.of("messages", "and prompt exclude each other")
        if self.messages is not None:
            return "messages", chat_prompt(self.messages)
        return "prompt", None if self.prompt is None else TextPrompt(self.prompt)


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: list[int]


def parse_body(kind: type[M], raw: bytes) -> M:
    """A body, or InvalidArgument that names every field that is wrong."""
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError):
        raise InvalidArgument.of("body", "must be valid JSON in UTF-8") from None
    if not isinstance(content, dict):
        raise InvalidArgument.of("body", "must be a JSON object")
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        violations = tuple(_violation(dict(item)) for item in error.errors(include_url=False, include_input=False))
        first = violations[0]
        raise InvalidArgument(f"{first.field} {first.description}", violations=violations) from None


def chat_prompt(messages: Sequence[MessageBody]) -> ChatPrompt:
    for index, message in enumerate(messages):
        for number, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if part.type != "text":
                raise InvalidArgument.of(
                    f"messages[{index}].content[{number}].type", "must be text; nothing else is supported"
                )
    return ChatPrompt([message.plain() for message in messages])


def _violation(item: dict[str, Any]) -> FieldViolation:
    name = ""
    for part in item["loc"]:
        # pydantic names the member of a union too ("str", "list[str]"): not part of a field's path
        if isinstance(part, int):
            name += f"[{part}]"
        elif part not in ("str", "list[str]", "list[TextPart]"):
            name += f".{part}" if name else str(part)[:100]
    if item["type"] == "extra_forbidden":
        return FieldViolation(name, "is not a known field")
    if item["type"] == "missing":
        return FieldViolation(name, "must be given")
    message = str(item["msg"])
    return FieldViolation(name, f"is wrong: {message[:1].lower()}{message[1:200]}")


def _logit_bias(given: dict[str, float]) -> list[tuple[int, float]]:
    bias = []
    for key, value in given.items():
        if not key.isascii() or not key.isdigit() or len(key) > 10:
            raise InvalidArgument.of("logit_bias", f"must have token ids as keys, got {key[:20]!r}")
        bias.append((int(key), float(value)))
    return bias


def _prompts(prompt: Any) -> list[Prompt]:
    """The prompts of a completion: a string, strings, ids, or lists of ids."""
    if isinstance(prompt, str):
        return [TextPrompt(prompt)]
    if not isinstance(prompt, list) or not prompt:
        raise InvalidArgument.of(
            "prompt", "must be a string, a list of strings, token ids or a list of these, not empty"
        )
    if _all_ints(prompt):
        return [IdsPrompt(prompt)]
    if len(prompt) > MAX_BATCH_PROMPTS:
        raise InvalidArgument.of("prompt", f"must hold at most {MAX_BATCH_PROMPTS} prompts, got {len(prompt)}")
    if all(isinstance(item, str) for item in prompt):
        return [TextPrompt(item) for item in prompt]
    if all(isinstance(item, list) and _all_ints(item) for item in prompt):
        return [IdsPrompt(item) for item in prompt]
    raise InvalidArgument.of("prompt", "must hold strings, or integers, or lists of integers, and not a mix")


def _all_ints(items: list[Any]) -> bool:
    return all(type(item) is int for item in items)
