"""Chat templates in a sandbox: messages in, prompt text out.

A template comes with a model's files, and messages come from clients. The template therefore runs without access to
other objects and within a limit on processor time. The limit is checked between pieces of its output: a loop without
output is stopped only by the sandbox's limit on ranges.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import InvalidArgument, StartupError
from gateway.intake.limits import MAX_PROMPT_BYTES, MAX_TEMPLATE_CPU_S


class _Refused(TemplateError):
    """Raised by a template's `raise_exception`. The message is the template author's text for the client."""


class ChatTemplate:
    """A compiled template. `render` may be called from any thread."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise StartupError(f"the model's chat template is not valid Jinja: {str(error)[:200]}") from None

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Returns the prompt that asks the assistant to continue. Raises InvalidArgument if the template refuses the
        messages.
        """
        until = time.thread_time() + MAX_TEMPLATE_CPU_S
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(
                messages=[dict(m) for m in messages], add_generation_prompt=True, tools=None, **self._special_tokens
            ):
                pieces.append(piece)
                size += len(piece)
                if time.thread_time() > until:
                    raise InvalidArgument.of(
                        "messages", f"took the chat template more than {MAX_TEMPLATE_CPU_S * 1000:.0f} ms"
                    )
                if size > MAX_PROMPT_BYTES:
                    raise InvalidArgument.of("messages", f"must be at most {MAX_PROMPT_BYTES} bytes as a prompt")
        except _Refused as error:
            raise InvalidArgument.of(
                "messages", f"are refused by the model's chat template: {str(error)[:200]}"
            ) from None
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError, AttributeError):
            raise InvalidArgument.of("messages", "cannot be rendered by the model's chat template") from None
        return "".join(pieces)


def _raise_exception(message: str) -> None:
    raise _Refused(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)
