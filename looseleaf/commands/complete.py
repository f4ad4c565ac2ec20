"""`looseleaf complete PROMPT`: stream the continuation of a prompt to stdout."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pydantic import Field
from pydantic_settings import CliPositionalArg

from common.settings import settings_config
from looseleaf.commands.options import ClientSettings


class CompleteSettings(ClientSettings):
    """Continue a prompt; the text streams to stdout as it is generated."""

    model_config = settings_config("LOOSELEAF_CLIENT_", "looseleaf complete")

    prompt: CliPositionalArg[str] = Field(description="the text to continue; - reads it from stdin")
    max_tokens: int | None = 128


def run(argv: Sequence[str]) -> int:
    settings = CompleteSettings.load(argv)
    prompt = sys.stdin.read() if settings.prompt == "-" else settings.prompt
    with settings.client() as client:
        for piece in client.generate(prompt, stream=True, **settings.options()):
            print(piece.text, end="", flush=True)
    print()
    return 0
