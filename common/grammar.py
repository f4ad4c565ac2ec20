"""Compiles grammars for structured output with llguidance, within limits.

Workers compile the grammars that restrict their draws. The gateway's main process does not load llguidance. Instead, a
separate process first tries a client's grammar (`gateway.intake.grammar_trial`), because some grammars crash the
compiler or keep it busy.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from common.types import StructuredOutput

LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 50_000,
    "step_lexer_fuel": 10_000,
    "step_max_items": 10_000,
    "max_lexer_states": 10_000,
    "max_grammar_size": 100_000,
}
"""Limits of llguidance. For the hostile regular expressions that we measured, computing a mask takes at most about 60
ms with these limits (1.6 s without them), and llguidance reports at most 20 MB for a lexer (1 to 2 KB per state). Some
grammars are expensive within these limits, so `gateway.intake.grammar_trial` also limits CPU time and memory.
"""
WHITESPACE = r"( |\r?\n {0,16}|\r?\n\t{0,8})"
"""The whitespace between two tokens of JSON: a space, or a new line with its indentation. Without a limit, a small
model may never stop adding whitespace.
"""
MAX_STEPS = 6
"""Maximum number of tokens that a trial draws on each of its paths."""
MAX_REASON_CHARS = 200


class GrammarError(Exception):
    """The error for a grammar that cannot be used. Its message is the part of a sentence that follows the name of the
    client's field.
    """


def load_tokenizer(directory: str | Path, vocab_size: int) -> LLTokenizer:
    """Returns the tokenizer of a model's directory, for logits of `vocab_size` columns. No grammar allows token ids
    that are missing from the tokenizer. Raises GrammarError if the tokenizer cannot be loaded.
    """
    path = Path(directory)
    try:
        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        text, eos = tokenizer.to_str(), eos_token_ids(path)
        last = max(tokenizer.get_vocab().values(), default=0)
        return LLTokenizer(text, n_vocab=max(vocab_size, last + 1), eos_token=list(eos) or None)
    except Exception as error:  # both libraries raise plain Exception
        raise GrammarError("cannot be used: this model's tokenizer does not support grammars") from error


def eos_token_ids(directory: Path) -> tuple[int, ...]:
    """Returns the end-of-sequence ids from the first of the model's files that contains any. The gateway applies the
    same rule.
    """
    for name in ("generation_config.json", "config.json"):
        file = directory / name
        value = json.loads(file.read_bytes()).get("eos_token_id") if file.exists() else None
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list) and value:
            return tuple(map(int, value))
    return ()


def compile_grammar(tokenizer: LLTokenizer, wanted: StructuredOutput) -> LLMatcher:
    """Returns a grammar in its initial state, with the first mask computed. Raises GrammarError if the grammar cannot
    be compiled, exceeds a limit or matches nothing.
    """
    limits = LLParserLimits(verbose_errors=False, **LIMITS)
    try:
        matcher = LLMatcher(tokenizer, _source(wanted), log_level=0, limits=limits)
    except ValueError as error:
        raise GrammarError(f"cannot be compiled: {_reason(str(error))}") from None
    if matcher.is_error():
        raise GrammarError(f"cannot be compiled: {_reason(matcher.get_error())}")
    mask = matcher.compute_bitmask()
    if matcher.is_error() or not any(mask):
        raise GrammarError(f"cannot be used: {_reason(matcher.get_error())}")
    return matcher


def explore(tokenizer: LLTokenizer, start: LLMatcher) -> None:
    """Follows a compiled grammar for a few tokens, on a few paths. Raises GrammarError if a path becomes too complex.
    This detects many hostile grammars whose first mask is within the limits.
    """
    for way in (0, 1, 2):
        matcher = start.deep_copy()
        for _ in range(MAX_STEPS):
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            bits[tokenizer.eos_tokens] = 0
            allowed = np.flatnonzero(bits)
            if matcher.is_error() or not len(allowed):
                break
            matcher.consume_token(int(allowed[way * (len(allowed) - 1) // 2]))
            if matcher.is_stopped():
                break
        if matcher.is_error():
            raise GrammarError("is too complex after a few tokens")


def _source(wanted: StructuredOutput) -> str:
    """Returns the grammar in llguidance's syntax."""
    if wanted.kind in ("json_schema", "json_object"):
        schema = wanted.source.strip() if wanted.kind == "json_schema" else '{"type": "object"}'
        schema = {"true": "{}", "false": '{"enum": []}'}.get(schema, schema)  # llguidance adds options to an object
        source: Any = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE})
    elif wanted.kind == "regex":
        source = LLMatcher.grammar_from_regex(wanted.source)
    elif wanted.kind == "choice":
        options = " | ".join(map(json.dumps, wanted.options))
        source = LLMatcher.grammar_from_lark(f"start: OPTION\nOPTION: {options}")
    else:
        source = LLMatcher.grammar_from_lark(wanted.source)
    return str(source)


def _reason(error: str) -> str:
    """Returns the sentence of llguidance's message that states the error, without the drawing that shows the
    position.
    """
    lines = [line.strip() for line in error.splitlines() if line.strip() and not line.startswith("<")]
    if "NoExtension" in error:
        return "it matches no text"
    said = next((line.removeprefix("error:").strip() for line in lines if line.startswith("error:")), None)
    text = said or (lines[0] if lines else "it matches no text")
    return "".join(c if c.isprintable() else " " for c in text)[:MAX_REASON_CHARS]
