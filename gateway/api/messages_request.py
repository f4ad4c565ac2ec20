"""The bodies of POST /v1/messages and /v1/messages/count_tokens, which are Anthropic's API. Text only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from common.errors import InvalidArgument, Unimplemented
from gateway.api.openai_request import Body
from gateway.api.responses_request import InputItem, InputPart, check_parts, text_of
from gateway.intake.wanted import ChatPrompt, Wanted

ROLES = ("user", "assistant")


class Thinking(msgspec.Struct):
    type: str


class CountTokensBody(Body, kw_only=True):
    """The body of POST /v1/messages/count_tokens: a conversation."""

    ignored = frozenset(
        ("metadata", "service_tier", "cache_control", "inference_geo", "user_profile_id", "workspace_id", "speed")
    )
    unsupported: ClassVar[Mapping[str, Any]] = {
        "tools": [], "tool_choice": None, "container": None, "mcp_servers": [], "output_config": None,
        "output_format": None, "context_management": None,
    }  # fmt: skip

    messages: list[InputItem]
    system: str | list[InputPart] | None = None
    thinking: Thinking | None = None

    def prompt(self) -> ChatPrompt:
        """Returns the conversation. Raises InvalidArgument, Unimplemented."""
        if self.thinking is not None and self.thinking.type != "disabled":
            raise Unimplemented.of("thinking.type", f"{self.thinking.type[:40]!r} is not supported yet")
        if not self.messages:
            raise InvalidArgument.of("messages", "must hold at least one message")
        check_parts("messages", self.messages)
        system = text_of(self.system, "system") if isinstance(self.system, list) else self.system
        first = [] if system is None else [{"role": "system", "content": system}]
        return ChatPrompt([*first, *(m.plain(f"messages[{i}]", ROLES) for i, m in enumerate(self.messages))])


class MessagesBody(CountTokensBody, kw_only=True):
    """The body of POST /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    def all_wanted(self) -> list[Wanted]:
        """Returns the body's only request."""
        wanted = Wanted(stop=self.stop_sequences or (), prompt=self.prompt(), prompt_field="messages")
        for name in ("model", "max_tokens", "temperature", "top_p", "top_k"):
            setattr(wanted, name, getattr(self, name))
        return [wanted]
