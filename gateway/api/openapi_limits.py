"""Adds limits to the fields in /openapi.json, from the table that checks requests (`gateway.intake.limits`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.intake.limits import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_BYTES,
    MAX_BAD_WORDS,
    MAX_BATCH_PROMPTS,
    MAX_CHOICE_BYTES,
    MAX_CHOICES,
    MAX_ID_DIGITS,
    MAX_LOGIT_BIAS,
    MAX_NAME_BYTES,
    MAX_SALT_BYTES,
    MAX_STOP_BYTES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    RANGES,
    Range,
)

Schema = dict[str, Any]
_NOT_BLANK = {"minLength": 1, "pattern": r"\S"}
_TEXTS: Mapping[str, Schema] = {
    "stop": {"minLength": 1, "maxLength": MAX_STOP_BYTES},
    "stop_sequences": {"minLength": 1, "maxLength": MAX_STOP_BYTES},
    "bad_words": {**_NOT_BLANK, "maxLength": MAX_BAD_WORD_BYTES},
    "choice": {"minLength": 1, "maxLength": MAX_CHOICE_BYTES},
    "guided_choice": {"minLength": 1, "maxLength": MAX_CHOICE_BYTES},
    "regex": _NOT_BLANK,
    "grammar": _NOT_BLANK,
    "guided_regex": _NOT_BLANK,
    "guided_grammar": _NOT_BLANK,
    "request_id": {"maxLength": MAX_NAME_BYTES, "pattern": "^[A-Za-z0-9._:/+=@-]*$"},
    "cache_salt": {"maxLength": MAX_SALT_BYTES},
    "role": {"minLength": 1, "maxLength": MAX_NAME_BYTES},
    "input": {"minLength": 1},
    "text_1": {"minLength": 1},
    "text_2": {"minLength": 1},
}
"""The limits of a text by field name, for a field that is a text or a list of texts. The server counts bytes, not
characters.
"""
_ARRAYS: Mapping[str, Schema] = {
    "stop": {"maxItems": MAX_STOP_STRINGS},
    "stop_sequences": {"maxItems": MAX_STOP_STRINGS},
    "bad_words": {"maxItems": MAX_BAD_WORDS},
    "choice": {"minItems": 1, "maxItems": MAX_CHOICES},
    "guided_choice": {"minItems": 1, "maxItems": MAX_CHOICES},
    "messages": {"minItems": 1},
    "input": {"minItems": 1},
    "text_1": {"minItems": 1, "maxItems": MAX_BATCH_PROMPTS - 1},
    "text_2": {"minItems": 1, "maxItems": MAX_BATCH_PROMPTS - 1},
}


@dataclass(frozen=True, slots=True)
class Served:
    """The properties of the model and its workers on which limits depend."""

    vocab_size: int
    max_model_len: int
    max_sequences: int = int(RANGES["n"].high)
    """The largest number of sequences that a decode worker runs at once."""
    dimensions: int | None = None
    """Number of dimensions of an embedding, or None if it is unknown."""
    reads_tools: bool = True
    """Whether the chat template reads tools."""
    writes_calls: bool = True
    """Whether the chat template writes the tool calls of earlier answers."""
    calls_tools: bool = True
    """Whether answers can have tool calls: the chat template reads tools, and their format is known."""

    @property
    def ids(self) -> Schema:
        token = {"type": "integer", "minimum": 0, "maximum": self.vocab_size - 1}
        return {"type": "array", "items": token, "minItems": 1, "maxItems": self.max_model_len - 1}

    @property
    def prompt(self) -> Schema:
        text = {"type": "string", "minLength": 1}
        lists = [
            {"type": "array", "items": items, "minItems": 1, "maxItems": MAX_BATCH_PROMPTS}
            for items in (text, self.ids)
        ]
        return {"anyOf": [text, self.ids, *lists], "description": "A text, texts, token ids or lists of token ids."}

    @property
    def ranges(self) -> Mapping[str, Range]:
        output, prompt = Range(1, self.max_model_len - 1), Range(-1, self.max_model_len)
        sequences = Range(1, min(RANGES["n"].high, self.max_sequences))
        return {
            **RANGES, "max_tokens": output, "max_completion_tokens": output, "max_output_tokens": output,
            "min_tokens": Range(0, self.max_model_len - 1), "truncate_prompt_tokens": prompt,
            "top_k": Range(-1, self.vocab_size), "top_logprobs": RANGES["logprobs"], "n": sequences,
            "best_of": sequences,
        }  # fmt: skip


def limit_fields(schema: Schema, served: Served) -> None:
    """Adds the limits of an object's fields to the object's schema."""
    properties = schema["properties"]
    for name, limit in served.ranges.items():
        for option in options_of(properties.get(name, {}), "integer", "number"):
            option |= {"exclusiveMinimum" if limit.above_low else "minimum": limit.low, "maximum": limit.high}
    if "truncate_prompt_tokens" in properties:
        properties["truncate_prompt_tokens"]["not"] = {"const": 0}
    for name, limits in _TEXTS.items():
        field = properties.get(name, {})
        for option in options_of(field, "string"):
            option |= limits
        for array in options_of(field, "array"):
            for item in options_of(array["items"], "string"):
                item |= limits
    for name, limits in _ARRAYS.items():
        for option in options_of(properties.get(name, {}), "array"):
            option |= limits
    _limit_ids(properties, served)
    for option in options_of(properties.get("dimensions", {}), "integer"):
        option |= {"minimum": 1} if served.dimensions is None else {"minimum": 1, "maximum": served.dimensions}
    for option in options_of(properties.get("stop", {}), "array"):
        properties["stop"]["description"] = f"At most {option['maxItems']} strings, not empty."


def _limit_ids(properties: Schema, served: Served) -> None:
    for option in options_of(properties.get("stop_token_ids", {}), "array"):
        option |= {**served.ids, "minItems": 0, "maxItems": MAX_STOP_TOKEN_IDS}
    for option in options_of(properties.get("allowed_token_ids", {}), "array"):
        option |= {**served.ids, "maxItems": MAX_ALLOWED_TOKEN_IDS}
    for option in options_of(properties.get("logit_bias", {}), "object"):
        bias = RANGES["logit_bias"]
        option["additionalProperties"] = {"type": "number", "minimum": bias.low, "maximum": bias.high}
        option["propertyNames"] = {"pattern": pattern_below(served.vocab_size), "maxLength": MAX_ID_DIGITS}
        option["maxProperties"] = MAX_LOGIT_BIAS


def pattern_below(limit: int) -> str:
    """Returns a regular expression for the decimal numbers from 0 to `limit` - 1, with any number of leading zeros."""
    last = str(limit - 1)
    options = [f"[0-9]{{1,{len(last) - 1}}}"] if len(last) > 1 else []
    for index, digit in enumerate(last):  # equal digits up to `index`, then a smaller one, then any
        if digit != "0":
            options.append(f"{last[:index]}[0-{int(digit) - 1}]" + "[0-9]" * (len(last) - index - 1))
    return f"^0*({'|'.join([*options, last])})$"


def options_of(schema: Schema, *kinds: str) -> list[Schema]:
    """Returns the alternatives of a field's schema that have one of these types."""
    return [option for option in (schema, *schema.get("anyOf", ())) if option.get("type") in kinds]
