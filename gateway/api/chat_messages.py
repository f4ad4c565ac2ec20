"""Converts the messages of a chat from the form of OpenAI's API to the form that chat templates expect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec

from common.errors import InvalidArgument
from gateway.intake.limits import MAX_CONTENT_PARTS

Nothing = Annotated[list[None], msgspec.Meta(max_length=0)]
_OTHER_MEDIA = {
    "image_url": "an image", "input_image": "an image", "image": "an image", "image_pil": "an image",
    "image_embeds": "an image", "input_audio": "audio", "audio_url": "audio", "audio": "audio", "video_url": "a video",
    "video": "a video", "file": "a file", "input_file": "a file",
}  # fmt: skip


class ContentPart(msgspec.Struct):
    """A part of a message's content. The fields of media other than text are not read."""

    type: str
    text: str | None = None


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None
    """The arguments, as an object or, as in OpenAI's answers, as JSON text."""


class ToolCall(msgspec.Struct):
    """A tool call of an earlier answer. Fields that clients copy from an answer (`index`) are not read."""

    function: CalledFunction
    id: str | None = None
    type: str = "function"


class MessageBody(msgspec.Struct, forbid_unknown_fields=True):
    """A message of a chat. Fields that clients copy from an answer are accepted: OpenAI's fields (`refusal: null`, ...)
    must be empty, and the fields that client libraries add (`parsed`, ...) are not read.
    """

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: None = None
    annotations: Nothing | None = None
    audio: None = None
    function_call: None = None
    parsed: Any = None
    provider_specific_fields: Any = None
    thinking_blocks: Any = None
    reasoning_details: Any = None

    def plain(self, name: str) -> dict[str, Any]:
        """Returns the message as chat templates expect it. Raises InvalidArgument if the message is invalid. The error
        identifies the message by `name`.
        """
        plain: dict[str, Any] = {"role": self.role, "content": self._text(f"{name}.content")}
        for key in ("name", "tool_call_id", "reasoning_content", "reasoning"):
            if (value := getattr(self, key)) is not None:
                plain[key] = value
        if self.tool_calls:
            if self.role != "assistant":
                raise InvalidArgument.of(f"{name}.tool_calls", "may only be part of an assistant message")
            plain["tool_calls"] = list(self._calls(f"{name}.tool_calls"))
        elif self.content is None:
            raise InvalidArgument.of(f"{name}.content", "must be given, unless an assistant message has tool_calls")
        return plain

    def _text(self, name: str) -> str | None:
        if not isinstance(self.content, list):
            return self.content
        for number, part in enumerate(self.content):
            if part.type in _OTHER_MEDIA:
                what = f"is {_OTHER_MEDIA[part.type]} ({part.type}); the model takes text only"
                raise InvalidArgument.of(f"{name}[{number}]", what)
            if part.type != "text":
                raise InvalidArgument.of(f"{name}[{number}].type", "must be text; nothing else is supported")
            if part.text is None:
                raise InvalidArgument.of(f"{name}[{number}].text", "must be given")
        return "".join(part.text or "" for part in self.content)

    def _calls(self, name: str) -> Iterator[dict[str, Any]]:
        for number, call in enumerate(self.tool_calls or ()):
            if call.type != "function":
                raise InvalidArgument.of(f"{name}[{number}].type", "must be function; nothing else is supported")
            arguments = call_arguments(f"{name}[{number}].function.arguments", call.function.arguments)
            function = {"name": call.function.name, "arguments": arguments}
            yield {**({} if call.id is None else {"id": call.id}), "type": "function", "function": function}


def plain_messages(messages: Sequence[MessageBody]) -> list[dict[str, Any]]:
    """Returns messages for a chat template. Raises InvalidArgument for the first invalid message, or if the messages
    together have too many parts of content.
    """
    if sum(len(message.content) for message in messages if isinstance(message.content, list)) > MAX_CONTENT_PARTS:
        raise InvalidArgument.of("messages", f"must hold at most {MAX_CONTENT_PARTS} parts of content")
    return [message.plain(f"messages[{index}]") for index, message in enumerate(messages)]


def call_arguments(name: str, given: str | dict[str, Any] | None) -> dict[str, Any]:
    """Returns the arguments of a call as the object that chat templates expect; missing or blank arguments become an
    empty object. Raises InvalidArgument if the arguments are not a JSON object. The error identifies them by `name`.
    """
    if isinstance(given, dict):
        return given
    try:
        found = msgspec.json.decode(given) if given and not given.isspace() else {}
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise InvalidArgument.of(name, "must be a JSON object, as text")
    return found
