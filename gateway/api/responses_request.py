"""The body of POST /v1/responses, OpenAI's Responses API without state: each request has the whole conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from common.errors import InvalidArgument, Unimplemented
from gateway.api.openai_request import Body, logit_bias_of
from gateway.api.vllm_fields import UNSUPPORTED
from gateway.intake.limits import MAX_CONTENT_PARTS
from gateway.intake.wanted import ChatPrompt, Wanted

ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text")
_NOTHING_STORED = "cannot be used: nothing is stored here; send the whole conversation as input"
_WITHOUT_EFFECT = ("reasoning.encrypted_content",)
"""Values of `include` that have no effect for a model whose reasoning is not split off."""


class InputPart(msgspec.Struct):
    """A part of a message's content. Clients send back parts of answers, whose other fields are not needed."""

    type: str
    text: str | None = None


class InputItem(msgspec.Struct):
    """An item of the input. Only messages are supported."""

    type: str = "message"
    role: str | None = None
    content: str | list[InputPart] | None = None

    def plain(self, name: str, roles: Sequence[str] = ROLES) -> dict[str, str]:
        """Returns the message in the form that templates expect. Errors use `name` for the item."""
        if self.type != "message":
            raise Unimplemented.of(f"{name}.type", f"{self.type[:40]!r} is not supported yet: only messages are")
        if self.role is None or self.role not in roles:
            raise InvalidArgument.of(f"{name}.role", f"must be one of {', '.join(roles)}")
        if self.content is None:
            raise InvalidArgument.of(f"{name}.content", "must be given")
        if isinstance(self.content, str):
            return {"role": self.role, "content": self.content}
        return {"role": self.role, "content": text_of(self.content, f"{name}.content")}


def check_parts(name: str, items: Sequence[InputItem]) -> None:
    """Raises InvalidArgument for too many parts of content."""
    if sum(len(item.content) for item in items if isinstance(item.content, list)) > MAX_CONTENT_PARTS:
        raise InvalidArgument.of(name, f"must hold at most {MAX_CONTENT_PARTS} parts of content")


def text_of(parts: Sequence[InputPart], name: str) -> str:
    """Returns the text of a message's parts. Errors use `name` for the list of parts."""
    texts: list[str] = []
    for index, part in enumerate(parts):
        if part.type not in _TEXT_PARTS:
            what = f"{part.type[:40]!r} is not supported: the model reads text only"
            raise Unimplemented.of(f"{name}[{index}].type", what)
        if part.text is None:
            raise InvalidArgument.of(f"{name}[{index}].text", "must be given")
        texts.append(part.text)
    return "".join(texts)


class TextFormat(msgspec.Struct):
    type: str


class TextConfig(msgspec.Struct):
    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None


class ResponsesBody(Body, kw_only=True):
    """The body of POST /v1/responses. `store` has no effect: nothing is stored."""

    ignored = frozenset(
        (
            "user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
            "parallel_tool_calls", "stream_options", "max_tool_calls",
        )
    )  # fmt: skip
    unsupported: ClassVar[Mapping[str, Any]] = {
        "structured_outputs": None, "guided_json": None, "guided_regex": None, "guided_choice": None,
        "guided_grammar": None, "guided_decoding_backend": None,
        **UNSUPPORTED,
        "background": False, "conversation": None, "prompt": None, "tools": [], "top_logprobs": 0,
        "truncation": "disabled", "context_management": None,
    }  # fmt: skip

    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    tool_choice: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    cache_salt: str | None = None
    priority: int | None = None
    request_id: str | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None

    def all_wanted(self) -> list[Wanted]:
        """Returns the body's only request."""
        self._check()
        wanted = Wanted(stop=[self.stop] if isinstance(self.stop, str) else self.stop or ())
        for name in _PLAIN:
            setattr(wanted, name, getattr(self, name))
        wanted.prompt, wanted.prompt_field = ChatPrompt(self._messages()), "input"
        wanted.max_tokens = self.max_output_tokens
        wanted.logit_bias = logit_bias_of(self.logit_bias or {})
        wanted.stop_token_ids = self.stop_token_ids or ()
        wanted.ignore_eos = bool(self.ignore_eos)
        wanted.skip_special_tokens = self.skip_special_tokens is not False
        return [wanted]

    def _check(self) -> None:
        """Refuses known but unsupported options."""
        if self.previous_response_id is not None:
            raise Unimplemented.of("previous_response_id", _NOTHING_STORED)
        if self.text is not None and self.text.format is not None and self.text.format.type != "text":
            raise Unimplemented.of("text.format", f"of type {self.text.format.type[:40]!r} is not supported yet")
        if self.reasoning is not None and self.reasoning.effort is not None:
            raise Unimplemented.of("reasoning.effort")
        if self.tool_choice not in (None, "none", "auto"):
            raise Unimplemented.of("tool_choice")
        for index, item in enumerate(self.include or ()):
            if item not in _WITHOUT_EFFECT:
                raise Unimplemented.of(f"include[{index}]", f"{item[:60]!r} is not supported yet")

    def _messages(self) -> list[dict[str, str]]:
        first = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str):
            if not self.input:
                raise InvalidArgument.of("input", "must not be empty")
            return [*first, {"role": "user", "content": self.input}]
        check_parts("input", self.input)
        if not self.input:
            raise InvalidArgument.of("input", "must hold at least one item")
        return [*first, *(item.plain(f"input[{index}]") for index, item in enumerate(self.input))]


_PLAIN = (
    "model", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "min_tokens", "cache_salt", "priority", "request_id", "truncate_prompt_tokens",
)  # fmt: skip
