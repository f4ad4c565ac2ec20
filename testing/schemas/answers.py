"""Requests one streamed answer for each schema over HTTP, and judges the answers."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
import jsonschema  # type: ignore[import-untyped]
from llguidance import LLTokenizer

from common.grammar import compile_grammar
from common.types import StructuredOutput

FIELD = "response_format.json_schema.schema"
MAX_TOKENS = 600
_FORMATS = jsonschema.FormatChecker(("uuid", "ipv4"))
"""The formats that are checked. Dates are not checked, because grammars allow dates such as 0000-01-30."""
_TIMEOUT_S = 300.0
_WORDS = ("once", "upon", "a", "time", "the", "old", "wolf", "and", "small", "fox", "went", "home")

Outcome = Literal["stop", "length", "refused", "failed"]


@dataclass(slots=True)
class Answer:
    """The answer for one schema. Times are `time.monotonic()` values."""

    schema: Mapping[str, Any]
    outcome: Outcome = "failed"
    """The finish reason, "refused" after a status of 400, or "failed" after another error or without an end."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    attempts: int = 0
    """The number of attempts that the server reports. If it is more than 1, the request was prefilled again."""
    began: float | None = None
    """The time of the first token."""
    ended: float | None = None
    problem: str = ""
    """The server's message about a request that was refused or that failed."""
    param: str = ""
    """The field that a refusal names."""

    @property
    def is_midway(self) -> bool:
        """Whether tokens have arrived, but not the end."""
        return self.began is not None and self.ended is None

    def spans(self, moment: float) -> bool:
        """Returns whether the client had received the beginning of the answer, but not its end, at `moment`."""
        return self.began is not None and self.ended is not None and self.began < moment < self.ended


class Questions:
    """The requests of one run, and their answers so far. Every second answer is greedy. The others are sampled."""

    def __init__(self, schemas: Sequence[Mapping[str, Any]]) -> None:
        self.answers = [Answer(schema) for schema in schemas]

    @property
    def num_midway(self) -> int:
        return sum(answer.is_midway for answer in self.answers)

    def ask_all(self, http_address: str, at_once: int) -> None:
        """Sends all requests, at most `at_once` at a time, and returns when all answers have ended."""
        asyncio.run(self._ask_all(http_address, at_once))

    async def _ask_all(self, http_address: str, at_once: int) -> None:
        places = asyncio.Semaphore(at_once)
        limits = httpx.Limits(max_connections=at_once)
        async with httpx.AsyncClient(base_url=f"http://{http_address}", timeout=_TIMEOUT_S, limits=limits) as http:

            async def one(number: int) -> None:
                async with places:
                    await self._ask(http, number)

            await asyncio.gather(*map(one, range(len(self.answers))))

    async def _ask(self, http: httpx.AsyncClient, number: int) -> None:
        answer = self.answers[number]
        named = {"type": "json_schema", "json_schema": {"name": "random", "schema": answer.schema}}
        body = {
            "prompt": _prompt(number), "max_tokens": MAX_TOKENS, "temperature": float(number % 2), "seed": number,
            "response_format": named, "stream": True, "return_token_ids": True,
        }  # fmt: skip
        try:
            async with http.stream("POST", "/v1/completions", json=body) as reply:
                if reply.status_code == 200:
                    async for line in reply.aiter_lines():
                        _take(answer, line)
                else:
                    error = json.loads(await reply.aread())["error"]
                    answer.outcome = "refused" if reply.status_code == 400 else "failed"
                    answer.problem, answer.param = error["message"], error["param"] or ""
        except httpx.HTTPError as error:
            answer.outcome, answer.problem = "failed", repr(error)
        answer.ended = time.monotonic()


def _prompt(number: int) -> str:
    """Returns a unique prompt, so that requests do not share blocks."""
    rng = random.Random(number)
    return f"{number} " + " ".join(rng.choice(_WORDS) for _ in range(120))


def _take(answer: Answer, line: str) -> None:
    """Adds a line of a stream to an answer."""
    if not line.startswith("data: {"):
        return
    chunk = json.loads(line[6:])
    if "error" in chunk:
        answer.outcome, answer.problem = "failed", str(chunk["error"])
        return
    answer.attempts = chunk.get("looseleaf", {}).get("attempts", answer.attempts)
    for choice in chunk["choices"]:
        answer.text += choice["text"]
        if ids := choice.get("token_ids"):
            answer.token_ids += ids
            answer.began = answer.began or time.monotonic()
        answer.outcome = choice["finish_reason"] or answer.outcome


def wrong(answer: Answer, tokenizer: LLTokenizer) -> str:
    """Returns a description of the error in an answer, or an empty string. A complete answer must parse and validate.
    An answer that ended at `MAX_TOKENS` must have exactly this number of tokens, which the schema's grammar must accept
    as the beginning of a match. A refusal must name the field.
    """
    match answer.outcome:
        case "stop":
            return _invalid(answer)
        case "length":
            matcher = compile_grammar(tokenizer, StructuredOutput("json_schema", json.dumps(answer.schema)))
            accepted = matcher.validate_tokens(answer.token_ids)
            count = len(answer.token_ids)
            return "" if accepted == count == MAX_TOKENS else f"{count} tokens, {accepted} of them match"
        case "refused":
            return "" if answer.param == FIELD and answer.problem else f"refused without the field: {answer.problem}"
        case _:
            return f"failed: {answer.problem or 'the stream has no end'}"


def _invalid(answer: Answer) -> str:
    try:
        jsonschema.Draft202012Validator(answer.schema, format_checker=_FORMATS).validate(json.loads(answer.text))
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{answer.text[:200]!r}: {str(error)[:200]}"
    return ""
