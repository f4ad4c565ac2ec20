"""`looseleaf chat ["message"]`: prints one answer, or holds a conversation turn by turn."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pydantic import Field
from pydantic_settings import CliPositionalArg

from common.errors import LooseleafError
from common.settings import settings_config
from looseleaf.client import Client
from looseleaf.commands.options import ClientSettings
from looseleaf.options import GenerateOptions, Message


class ChatSettings(ClientSettings):
    """Flags of `looseleaf chat`, which talks with the model. With a message, it prints one answer. Without a message,
    turns follow until an empty line or Ctrl-D.
    """

    model_config = settings_config("LOOSELEAF_CLIENT_", "looseleaf chat")

    message: CliPositionalArg[str | None] = Field(
        None, description="message to send; without it, a conversation turn by turn"
    )
    system: str | None = Field(None, description="a system message to begin with")
    max_tokens: int | None = 512


def run(argv: Sequence[str]) -> int:
    settings = ChatSettings.load(argv)
    turns: list[Message] = [{"role": "system", "content": settings.system}] if settings.system else []
    with settings.client() as client:
        if settings.message is not None:
            answer(client, [*turns, {"role": "user", "content": settings.message}], settings.options())
            return 0
        return converse(client, turns, settings.options())


def converse(client: Client, turns: list[Message], options: GenerateOptions) -> int:
    """Reads lines and answers them until an empty line or the end of the input. If a request fails, prints the error
    and leaves the turn out of the conversation. Returns the exit status, 0.
    """
    while text := read_line():
        turns.append({"role": "user", "content": text})
        try:
            turns.append({"role": "assistant", "content": answer(client, turns, options)})
        except LooseleafError as error:
            turns.pop()
            print(f"looseleaf: {error}", file=sys.stderr)
    return 0


def read_line() -> str:
    """Returns the user's next line, or "" at the end of the input. The prompt sign is shown only on a terminal."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""


def answer(client: Client, turns: Sequence[Message], options: GenerateOptions) -> str:
    """Prints the answer to `turns` as it arrives, and returns its text."""
    text = ""
    for delta in client.chat(turns, stream=True, **options):
        text += delta.text
        print(delta.text, end="", flush=True)
    print()
    return text
