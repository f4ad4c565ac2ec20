"""A hook for schemathesis. It accepts a refusal of a body that matches the schema but breaks a rule that no JSON schema
can express.

Each rule has a name and a reason. A refusal is accepted if the body may break the rule, and if the error is the rule's
error. Every other refusal of a body that the schema allows is a failure. The file named by $LOOSELEAF_REFUSALS gets one
line with the name of the rule for each accepted refusal.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import schemathesis

DEFAULT_MAX_TOKENS = 16
MAX_TEXTS = 64


class Rule(NamedTuple):
    name: str
    reason: str
    message: str
    """The error, as a regular expression."""
    breaks: Callable[[dict[str, Any]], bool]
    """Whether a body may break the rule."""


def values_of(value: Any, key: str) -> Iterator[Any]:
    """Yields the values of a key, at any depth."""
    if isinstance(value, dict):
        for name, item in value.items():
            if name == key:
                yield item
            yield from values_of(item, key)
    elif isinstance(value, list):
        for item in value:
            yield from values_of(item, key)


def is_object(text: Any) -> bool:
    try:
        return not text or text.isspace() or isinstance(json.loads(text), dict)
    except ValueError:
        return False


def asks_for_grammar(body: dict[str, Any]) -> bool:
    names = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")
    return any(body.get(name) is not None for name in names) or bool(list(values_of(body, "schema")))


def num_texts(body: dict[str, Any], name: str) -> int:
    return len(body[name]) if isinstance(body[name], list) else 1


def pairs_differ(body: dict[str, Any]) -> bool:
    first, second = num_texts(body, "text_1"), num_texts(body, "text_2")
    return first not in (1, second) or first + second > MAX_TEXTS


def has_repeated_functions(body: dict[str, Any]) -> bool:
    names = [name for tool in body.get("tools") or () for name in values_of(tool, "name")]
    return len(set(map(str, names))) < len(names)


def ends_without_content(body: dict[str, Any]) -> bool:
    return bool(body.get("continue_final_message")) and not body["messages"][-1].get("content")


RULES = (
    Rule(
        "context", "a prompt and its output together must fit into the context: a sum of lengths in tokens",
        r"max_tokens of \d+ and a prompt of \d+ tokens exceed|is \d+ tokens long; the limit is",
        lambda body: True,
    ),
    Rule(
        "blocks", "the samples together must fit into a worker's blocks: a product of lengths",
        r"need \d+ blocks of KV", lambda body: (body.get("n") or body.get("best_of") or 1) > 1,
    ),
    Rule(
        "min_tokens", "must not exceed max_tokens, or its default: a comparison of two fields",
        r"min_tokens must be at least 0 and at most",
        lambda body: body["min_tokens"] > (body.get("max_tokens") or DEFAULT_MAX_TOKENS),
    ),
    Rule(
        "best_of", "must equal n without a beam search: a comparison of two fields",
        r"best_of must equal n",
        lambda body: not body.get("use_beam_search") and body["best_of"] != (body.get("n") or 1),
    ),
    Rule(
        "beams", "a beam search returns at most best_of beams: a comparison of two fields",
        r"n must be at most \d+ \(best_of\)", lambda body: (body.get("n") or 1) > body["best_of"],
    ),
    Rule(
        "pairs", "text_1 has one text, or as many as text_2: a comparison of two lengths",
        r"text_1 must hold one text|and text_1 must hold at most", pairs_differ,
    ),
    Rule(
        "arguments", "a call's arguments are JSON inside a string",
        r"arguments must be a JSON object, as text",
        lambda body: not all(is_object(text) for text in values_of(body, "arguments") if isinstance(text, str)),
    ),
    Rule(
        "last message", "only the last message is continued, and no keyword names the last item of an array",
        r"continue_final_message needs a last message with content", ends_without_content,
    ),
    Rule(
        "named function", "must be one of the tools: a value from elsewhere in the body",
        r"tool_choice\S* must be the name of a tool", lambda body: isinstance(body["tool_choice"], dict),
    ),
    Rule("functions", "have different names", r"two functions with the same name", has_repeated_functions),
    Rule(
        "grammar", "a schema, a regular expression or a Lark grammar must compile, and its masks must be small",
        r"cannot be compiled|takes more than \S+ s to compile|(is|became) too complex",
        asks_for_grammar,
    ),
    Rule(
        "bytes", "lengths of text are counted in bytes",
        r"must be at most \d+ bytes",
        lambda body: not json.dumps(body, ensure_ascii=False).isascii(),
    ),
)  # fmt: skip


@schemathesis.hook
def filter_failure(context: Any, failure: Any, case: Any, response: Any) -> bool:
    """Keeps a failure, unless it is a refusal that a rule explains."""
    if type(failure).__name__ != "RejectedPositiveData" or response.status_code != 400:
        return True
    message = json.loads(response.content)["error"]["message"]
    for rule in RULES:
        if re.search(rule.message, message) and rule.breaks(case.body):
            with open(os.environ["LOOSELEAF_REFUSALS"], "a", encoding="utf-8") as refusals:
                print(rule.name, file=refusals)
            return False
    return True
