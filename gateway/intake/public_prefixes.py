"""Reads the prompt prefixes that an operator has declared public. Different tenants share only the blocks of these
prefixes.

A file is a JSON array. An item is a text, or the first messages of a conversation (a system prompt), which the model's
chat template turns into a prompt. The leading token ids that a prompt has in common with one of these prefixes are
public.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import Any

from common.errors import InvalidArgument, StartupError
from gateway.intake.wanted import ChatPrompt, Prompt, TextPrompt

Tokenize = Callable[[Prompt, str], Awaitable[list[int]]]


class PublicPrefixes:
    """The list of public prefixes, as token ids."""

    def __init__(self, prefixes: Sequence[Sequence[int]] = ()) -> None:
        self._prefixes = [list(prefix) for prefix in prefixes]

    def common_tokens(self, prompt_ids: Sequence[int]) -> int:
        """Returns the number of leading tokens of a prompt that are public."""
        return max((_common(prompt_ids, prefix) for prefix in self._prefixes), default=0)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(bool, map(eq, a, b)))


async def load_public_prefixes(path: str | None, tokenize: Tokenize) -> PublicPrefixes:
    """Returns the public prefixes in a file, or no prefixes if `path` is None. Raises StartupError for an invalid file;
    the error names the file and, if an item is invalid, the item.
    """
    if path is None:
        return PublicPrefixes()
    try:
        items = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise StartupError(f"--public-prefix-file {path} cannot be read as JSON: {error}") from None
    if not isinstance(items, list) or not items:
        raise StartupError(f"--public-prefix-file {path} must be a JSON array that is not empty")
    prefixes = []
    for index, item in enumerate(items):
        name = f"--public-prefix-file {path}, item {index}"
        try:
            prefixes.append(await tokenize(_prompt(item, name), f"item {index}"))
        except InvalidArgument as error:
            raise StartupError(f"{name}: {error}") from None
    return PublicPrefixes(prefixes)


def _prompt(item: Any, name: str) -> Prompt:
    if isinstance(item, str) and item:
        return TextPrompt(item)
    if isinstance(item, list) and item and all(map(_is_message, item)):
        return ChatPrompt(item)
    raise StartupError(f'{name}: must be a text, or an array of {{"role": ..., "content": ...}}, not empty')


def _is_message(item: Any) -> bool:
    return (
        isinstance(item, Mapping)
        and set(item) == {"role", "content"}
        and all(isinstance(value, str) for value in item.values())
    )
