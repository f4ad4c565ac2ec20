"""The limits on the fields of a request, for both gRPC and HTTP. Every violation names the field and what is wrong.
Values are Python numbers and strings, so this module does not depend on protobuf or JSON.

temperature is at most 2, as in OpenAI's API (vLLM has no maximum). top_k accepts -1 and 0 for "off", as vLLM does. n is
at most 128, as in OpenAI's API. beam_width is at most 32, because each beam is a row of every step and nothing is sent
before the end; over HTTP, the limit applies to best_of or n with use_beam_search. A length_penalty outside of its range
could overflow fp32 in a score. The workers' limits may be lower: their max_num_seqs, and the blocks of a group
(`gateway.intake.group_limits`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field

from common.errors import FieldViolation, InvalidArgument
from common.request_ids import is_request_id

Number = int | float
MAX_PROMPT_BYTES = 4 << 20
MIN_PROMPT_BYTES = 64 << 10
"""Minimum and maximum of the limit on a prompt's bytes, which is max_model_len times the longest token."""
MAX_PROMPT_LOGPROBS = 1 << 20
"""Maximum number of log-probabilities of prompt tokens in an answer, which repeats them in each choice."""
MAX_BODY_BYTES = 16 << 20
"""Maximum of the limit on a body's bytes, which follows from the limit on its prompts."""
BODY_SLACK_BYTES = 256 << 10
"""Bytes of a body that are allowed for everything except prompts."""
MAX_FIELD_BYTES = 64 << 10
"""Maximum size of an ordinary field as JSON, in bytes. Prompts, messages, tools and lists of allowed ids have
their own limits.
"""
MAX_BATCH_PROMPTS = 64
MAX_MESSAGES = 4096
MAX_CONTENT_PARTS = 4 * MAX_MESSAGES
MAX_TOOLS = 128
MAX_TOOLS_BYTES = 192 << 10
"""Maximum size of a request's tools as JSON, in bytes."""
MAX_VIOLATIONS = 16
"""Maximum number of violations that are reported for a request."""
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 300
MAX_ID_DIGITS = 10
"""Maximum number of digits of a token id that is the key of an object."""
MAX_BAD_WORDS = 64
"""Each word becomes at most two sequences of tokens, so all words together ban at most 128 tokens at a time."""
MAX_BAD_WORD_BYTES = 256
MAX_ALLOWED_TOKEN_IDS = 10_000
MAX_GRAMMAR_BYTES = 64 << 10
"""Maximum size of a JSON schema, a regular expression or a Lark grammar, in bytes."""
MAX_CHOICES = 1024
MAX_CHOICE_BYTES = 256
MAX_SALT_BYTES = 256
MAX_NAME_BYTES = 256
MAX_TEMPLATE_CPU_S = 0.1
TOO_LONG = "context_length_exceeded"
"""OpenAI's code for a prompt, or a prompt and its output, beyond max_model_len."""


@dataclass(frozen=True, slots=True)
class Range:
    """An interval of finite numbers. It includes its ends, except that `above_low` excludes the lower end."""

    low: Number
    high: Number
    above_low: bool = False

    def __str__(self) -> str:
        return f"{'above' if self.above_low else 'at least'} {self.low} and at most {self.high}"

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, int | float) or (isinstance(value, float) and not math.isfinite(value)):
            return False
        return (self.low < value if self.above_low else self.low <= value) and value <= self.high


RANGES: Mapping[str, Range] = {
    "temperature": Range(0, 2),
    "top_p": Range(0, 1, above_low=True),
    "min_p": Range(0, 1),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "repetition_penalty": Range(0, 10, above_low=True),
    "logit_bias": Range(-100, 100),
    "seed": Range(-(2**63), 2**63 - 1),
    "logprobs": Range(0, 20),
    "prompt_logprobs": Range(0, 20),
    "priority": Range(-(2**31), 2**31 - 1),
    "timeout": Range(0, 86_400, above_low=True),
    "n": Range(1, 128),
    "beam_width": Range(1, 32),
    "length_penalty": Range(-5, 5),
}
"""The ranges that do not depend on the model. `Checker` contains the other ranges."""


def check_prompt_logprobs(field: str, most: int | None, num_sequences: int, num_tokens: int) -> None:
    """Raises InvalidArgument if the answer would contain more than `MAX_PROMPT_LOGPROBS` log-probabilities of the
    prompts' tokens. `most` is the value of `field`, or None if it is not given.
    """
    if most is not None and (count := num_sequences * num_tokens * (most + 1)) > MAX_PROMPT_LOGPROBS:
        raise InvalidArgument.of(
            field,
            f"{most}, n {num_sequences} and {num_tokens} prompt tokens make {count} log-probabilities of prompts; "
            f"the limit is {MAX_PROMPT_LOGPROBS}",
        )


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """The limits on prompts for the served model."""

    text_bytes: int
    """Limit on one prompt, in bytes, before its number of tokens is known."""
    fitting_bytes: int
    """Size of the longest text that could fit into the context, but at most `MAX_PROMPT_BYTES`."""
    max_model_len: int
    """Limit on a prompt and its output together, in tokens."""


@dataclass(slots=True)
class Checker:
    """A collector of one request's violations, up to `MAX_VIOLATIONS`. `finish` raises them as one InvalidArgument."""

    vocab_size: int
    max_model_len: int
    violations: list[FieldViolation] = field(default_factory=list)

    def refuse(self, name: str, description: str, reason: str | None = None) -> None:
        if len(self.violations) < MAX_VIOLATIONS:
            self.violations.append(FieldViolation(name, description, reason))

    def finish(self) -> None:
        """Raises InvalidArgument if there are violations. The error's message describes the first violation."""
        if self.violations:
            first = self.violations[0]
            raise InvalidArgument(f"{first.field} {first.description}", violations=tuple(self.violations))

    def number(self, name: str, value: Number | None, limit: Range | None = None) -> None:
        """Checks that a number is within `limit`, or within its range in `RANGES` if `limit` is None. The value None
        means "not given" and passes. NaN and infinity do not pass.
        """
        limit = RANGES[name] if limit is None else limit
        if value is not None and value not in limit:
            self.refuse(name, f"must be {limit}, got {_shown(value)}")

    def top_k(self, value: int | None) -> None:
        self.number("top_k", value, Range(-1, self.vocab_size))

    def max_tokens(self, value: int | None) -> None:
        self.number("max_tokens", value, Range(1, self.max_model_len))

    def min_tokens(self, value: int | None, max_tokens: int | None) -> None:
        self.number("min_tokens", value, Range(0, self.max_model_len if max_tokens is None else max_tokens))

    def truncate_prompt_tokens(self, value: int | None) -> None:
        if value != -1:
            self.number("truncate_prompt_tokens", value, Range(1, self.max_model_len))

    def stop(self, strings: Sequence[str]) -> None:
        self._count("stop", strings, MAX_STOP_STRINGS, "strings")
        for index, text in enumerate(strings[:MAX_STOP_STRINGS]):
            name = f"stop[{index}]"
            if not text:
                self.refuse(name, "must not be empty")
            elif self.encodable(name, text):
                self._bytes(name, text, MAX_STOP_BYTES)

    def token_ids(self, name: str, ids: Sequence[int]) -> None:
        """Checks that all ids are within the vocabulary, and reports the first id that is not."""
        if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
            index = next(i for i, token in enumerate(ids) if not 0 <= token < self.vocab_size)
            self.refuse(
                f"{name}[{index}]",
                f"must be at least 0 and below the vocabulary size {self.vocab_size}, got {ids[index]}",
            )

    def stop_token_ids(self, ids: Sequence[int]) -> None:
        self._count("stop_token_ids", ids, MAX_STOP_TOKEN_IDS, "ids")
        self.token_ids("stop_token_ids", ids)

    def logit_bias(self, bias: Iterable[tuple[int, float]]) -> None:
        items = list(bias)
        self._count("logit_bias", items, MAX_LOGIT_BIAS, "entries")
        for token, value in items[:MAX_LOGIT_BIAS]:
            if not 0 <= token < self.vocab_size:
                self.refuse("logit_bias", f"must name ids below the vocabulary size {self.vocab_size}, got {token}")
            self.number(f"logit_bias[{token}]", value, RANGES["logit_bias"])

    def text(self, name: str, text: str, limit: int = MAX_PROMPT_BYTES, reason: str | None = None) -> None:
        """Checks that a text is valid Unicode and at most `limit` bytes long."""
        if not self.encodable(name, text):
            return
        self._bytes(name, text, limit, reason)

    def request_id(self, text: str | None) -> None:
        if text is None:
            return
        self.text("request_id", text, MAX_NAME_BYTES)
        if not is_request_id(text):
            self.refuse("request_id", "may contain only letters, digits and ._:/+=@-")

    def prompt_len(self, name: str, num_tokens: int) -> None:
        if num_tokens == 0:
            self.refuse(name, "must hold at least one token")
        elif num_tokens >= self.max_model_len:
            limit = self.max_model_len - 1
            what = f"is {num_tokens} tokens long; the limit is {limit} (max_model_len {self.max_model_len} less one)"
            self.refuse(name, what, TOO_LONG)

    def encodable(self, name: str, text: str) -> bool:
        """Returns whether the text is valid Unicode, and reports a violation if not. JSON can express lone surrogates,
        which are not valid.
        """
        if text.isascii():
            return True
        try:
            text.encode()
        except UnicodeEncodeError:
            self.refuse(name, "must be valid Unicode; it contains a lone surrogate")
            return False
        return True

    def _count(self, name: str, items: Sized, limit: int, unit: str) -> None:
        if len(items) > limit:
            self.refuse(name, f"must hold at most {limit} {unit}, got {len(items)}")

    def _bytes(self, name: str, text: str, limit: int, reason: str | None = None) -> None:
        num_bytes = len(text) if text.isascii() else len(text.encode())
        if num_bytes > limit:
            self.refuse(name, f"must be at most {limit} bytes, got {num_bytes}", reason)


def _shown(value: Number) -> str:
    text = str(value) if not isinstance(value, int) or abs(value) < 10**20 else "a larger integer"
    return text[:40]
