"""`looseleaf complete PROMPT`: streams the continuation of a prompt to stdout, or several continuations, one after
another.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from pydantic import Field
from pydantic_settings import CliPositionalArg

from common.settings import settings_config
from looseleaf.commands.options import ClientSettings
from looseleaf.results import Delta


class CompleteSettings(ClientSettings):
    """Flags of `looseleaf complete`, which continues a prompt and streams the text to stdout as it is generated."""

    model_config = settings_config("LOOSELEAF_CLIENT_", "looseleaf complete")

    prompt: CliPositionalArg[str] = Field(description="the text to continue; - reads it from stdin")
    max_tokens: int | None = 128
    n: int | None = Field(
        None, description="number of samples, printed one after the other; in a beam search, number of beams to return"
    )
    beam_width: int | None = Field(
        None, description="number of beams of a beam search; default: tokens are drawn at random"
    )
    length_penalty: float | None = Field(None, description="for beams: a value above 0 favours longer ones")
    early_stopping: Literal["true", "false", "never"] | None = Field(
        None, description="for beams: when the search ends"
    )

    @property
    def has_several(self) -> bool:
        return (self.n or self.beam_width or 1) > 1


def run(argv: Sequence[str]) -> int:
    settings = CompleteSettings.load(argv)
    prompt = sys.stdin.read() if settings.prompt == "-" else settings.prompt
    options = settings.options("n", "beam_width", "length_penalty")
    if settings.early_stopping is not None:
        options["early_stopping"] = "never" if settings.early_stopping == "never" else settings.early_stopping == "true"
    with settings.client() as client:
        show(client.generate(prompt, stream=True, **options), numbered=settings.has_several)
    return 0


def show(deltas: Iterable[Delta], *, numbered: bool) -> None:
    """Prints the samples one after another. If `numbered` is set, each sample begins with its index and, for a beam,
    its score.
    """
    begun = -1
    for delta in in_turn(deltas):
        if numbered and delta.index != begun:
            score = "" if delta.beam_score is None else f" (score {delta.beam_score:.4f})"
            print(f"[{delta.index}]{score} ", end="")
        begun = delta.index
        print(delta.text, end="" if delta.finish_reason is None else "\n", flush=True)


def in_turn(deltas: Iterable[Delta]) -> Iterator[Delta]:
    """Yields the deltas of the first sample as they arrive, then the deltas of the second sample, and so on."""
    current = 0
    waiting: dict[int, list[Delta]] = defaultdict(list)
    for delta in deltas:
        waiting[delta.index].append(delta)
        while ready := waiting.pop(current, []):
            yield from ready
            current += ready[-1].finish_reason is not None
