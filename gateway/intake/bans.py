"""Checks `bad_words`, which the output must not contain, and `allowed_token_ids`, the only tokens that it may contain.
Some combinations with other fields are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gateway.intake.group_limits import is_beam_search
from gateway.intake.limits import MAX_ALLOWED_TOKEN_IDS, MAX_BAD_WORD_BYTES, MAX_BAD_WORDS, Checker
from gateway.intake.tokenizing import TokenizerPool
from gateway.intake.wanted import Wanted


def check_bans(checker: Checker, wanted: Wanted, eos_token_ids: Collection[int]) -> None:
    """Adds the errors in `bad_words` and `allowed_token_ids` to `checker`."""
    _check_words(checker, wanted.bad_words)
    has_grammar = wanted.structured is not None or wanted.structured_after is not None
    if wanted.bad_words and has_grammar:
        checker.refuse("bad_words", f"may not be given with {wanted.structured_field}")
    if (allowed := wanted.allowed_token_ids) is None:
        return
    name = "allowed_token_ids"
    if not 1 <= len(allowed) <= MAX_ALLOWED_TOKEN_IDS:
        checker.refuse(name, f"must hold at least 1 and at most {MAX_ALLOWED_TOKEN_IDS} ids, got {len(allowed)}")
        return
    checker.token_ids(name, allowed)
    for is_given, other in (
        (has_grammar, wanted.structured_field),
        (wanted.bad_words, "bad_words"),
        (is_beam_search(wanted), "a beam search"),
    ):
        if is_given:
            checker.refuse(name, f"may not be given with {other}")
    ends = {*wanted.stop_token_ids, *(() if wanted.ignore_eos else eos_token_ids)}
    if wanted.min_tokens and ends.issuperset(allowed):
        checker.refuse(name, "must hold a token that does not end the output, because min_tokens is given")


def _check_words(checker: Checker, words: Sequence[str]) -> None:
    if len(words) > MAX_BAD_WORDS:
        checker.refuse("bad_words", f"must hold at most {MAX_BAD_WORDS} words, got {len(words)}")
    for index, word in enumerate(words[:MAX_BAD_WORDS]):
        if not word.strip():
            checker.refuse(f"bad_words[{index}]", "must not be empty")
        checker.text(f"bad_words[{index}]", word, MAX_BAD_WORD_BYTES)


async def bad_token_ids(pool: TokenizerPool, words: Sequence[str]) -> list[list[int]]:
    """Returns the token sequences of checked words. A word has one or two sequences: its tokens at the beginning of a
    text and, if the first token differs, its tokens after a space. Unlike in vLLM, the two sequences may differ in
    length.
    """
    found: list[list[int]] = []
    for word in words:
        plain = await pool.encode(word.lstrip(), add_special_tokens=False)
        spaced = await pool.encode(" " + word.lstrip(), add_special_tokens=False)
        found.append(plain)
        if spaced[:1] != plain[:1]:
            found.append(spaced)
    return [ids for ids in found if ids]
