"""The grammar state of a sample, which is a function of grammar and tokens, and ends, end tokens and limits."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLTokenizer

from common.grammar import GrammarError, compile_grammar, load_tokenizer
from common.types import StoppingParams, StructuredOutput
from engine import grammar_state
from engine.grammar_state import GrammarState, Mask
from engine.tiny import make_checkpoint

EOS = 2
VOCAB = 600
"""The width of the logits, which is larger than the tokenizer's 512 tokens, as in some models."""
JSON = StructuredOutput(
    "json_schema",
    '{"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}, "b": {"enum": ["x"]}}}',
)
WORDS = "the old house at the end of the street"
TEXTS = StructuredOutput("choice", options=(f"{WORDS} is red", f"{WORDS} was blue then", "another house"))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    make_checkpoint(directory, "llama", seed=0)
    return directory


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> LLTokenizer:
    return load_tokenizer(directory, VOCAB)


def begin(
    tokenizer: LLTokenizer, wanted: StructuredOutput, *, stop: tuple[int, ...] = (EOS,), min_tokens: int = 0
) -> GrammarState:
    stopping = StoppingParams(stop_token_ids=stop, min_tokens=min_tokens)
    return GrammarState(compile_grammar(tokenizer, wanted), tokenizer, stopping)


def regex(pattern: str) -> StructuredOutput:
    return StructuredOutput("regex", pattern)


def allowed(state: GrammarState, output_ids: list[int]) -> list[int]:
    return tokens_of(state.mask(output_ids))


def tokens_of(mask: Mask) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()


def walk(tokenizer: LLTokenizer, wanted: StructuredOutput, seed: int, length: int = 40) -> list[list[int]]:
    """Takes a random path through a grammar. Returns the path and the allowed tokens at each of its positions."""
    rng, state, way, seen = random.Random(seed), begin(tokenizer, wanted), list[int](), list[list[int]]()
    while len(way) < length and not state.is_over(way):
        seen.append(allowed(state, way))
        way.append(rng.choice(seen[-1]))
    return [way, *seen]


@pytest.mark.parametrize("wanted", [JSON, TEXTS], ids=("json", "texts"))
@pytest.mark.parametrize("seed", range(8))
def test_the_state_is_a_function_of_grammar_and_tokens(
    tokenizer: LLTokenizer, wanted: StructuredOutput, seed: int
) -> None:
    """The tokens arrive step by step, all at once, or after a fork midway. Masks after a draft are those of the state
    with its tokens.
    """
    way, *seen = walk(tokenizer, wanted, seed)
    for position, expected in enumerate(seen):
        tokens = way[:position]
        assert allowed(begin(tokenizer, wanted), tokens) == expected
        origin = begin(tokenizer, wanted)
        origin.follow(tokens[: position // 2])
        fork = origin.fork()
        masks = origin.masks_after(tokens[: position // 2], way[position // 2 : position], 60.0)
        assert [tokens_of(mask) for mask in masks] == seen[position // 2 + 1 : position + 1]
        origin.follow(way)
        assert allowed(fork, tokens) == expected


def test_a_forced_text_is_tokenized_once(tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that begins in the middle of the text forces the same tokens."""
    found = []
    is_only = GrammarState._is_only
    monkeypatch.setattr(GrammarState, "_is_only", lambda self, token: found.append(token) or is_only(self, token))  # type: ignore[func-returns-value]
    state, way = begin(tokenizer, StructuredOutput("choice", options=(WORDS,))), list[int]()
    while not state.is_over(way):
        [token] = allowed(state, way)
        way.append(token)
    assert len(found) == 1 and way == tokenizer.tokenize_str(WORDS)
    for position, token in enumerate(way):
        assert allowed(begin(tokenizer, StructuredOutput("choice", options=(WORDS,))), way[:position]) == [token]


def test_masks_after_end_where_a_token_may_not_follow_or_the_time_is_over(tokenizer: LLTokenizer) -> None:
    [a], [b], [c] = map(tokenizer.tokenize_str, "abc")
    state = begin(tokenizer, regex("a[ab]{2,5}"))
    assert len(state.masks_after([], [a, b, b, c, b], 60.0)) == 3
    assert state.masks_after([], [b], 60.0) == [] == state.masks_after([], [a, b], 0.0)
    assert allowed(state, [a]) == allowed(begin(tokenizer, regex("a[ab]{2,5}")), [a]), "the state has not changed"


def test_a_fork_does_not_move_its_origin(tokenizer: LLTokenizer) -> None:
    origin = begin(tokenizer, regex("[ab]c[de]"))
    [a], [b], [c] = map(tokenizer.tokenize_str, "abc")
    fork = origin.fork()
    fork.follow([b, c])
    assert allowed(origin, [a])[0] == c
    assert len(allowed(fork, [b, c])) == 2


def test_the_end_token_follows_only_where_the_grammar_accepts(tokenizer: LLTokenizer) -> None:
    state = begin(tokenizer, regex("a{2,3}"))
    [a] = tokenizer.tokenize_str("a")
    assert EOS not in allowed(state, [a])
    assert EOS in allowed(state, [a, a])
    assert not state.is_over([a, a])
    assert state.is_over([a, a, a]), "nothing can follow"
    assert state.is_over([a, a, EOS])


def test_an_end_token_that_would_not_end_the_sequence_never_follows(tokenizer: LLTokenizer) -> None:
    assert EOS not in allowed(begin(tokenizer, regex("a*"), stop=()), [])
    assert EOS in allowed(begin(tokenizer, regex("a*")), [])


def test_where_only_the_end_could_follow_and_there_is_no_end_token(tokenizer: LLTokenizer) -> None:
    with pytest.raises(GrammarError, match="lets no token"):
        begin(tokenizer, regex(""), stop=()).mask([])


def test_min_tokens_delays_stop_tokens_while_something_else_can_follow(tokenizer: LLTokenizer) -> None:
    [a], [b] = tokenizer.tokenize_str("a"), tokenizer.tokenize_str("b")
    state = begin(tokenizer, regex("[ab]{1,3}"), stop=(EOS, b), min_tokens=2)
    assert a in allowed(state, []) and b not in allowed(state, [])
    assert EOS not in allowed(state, [a])
    assert {EOS, b} <= set(allowed(state, [a, a]))
    forced = begin(tokenizer, regex("bb"), stop=(EOS, b), min_tokens=2)
    assert b in allowed(forced, []), "the grammar wins"


def test_tokens_that_only_the_model_has_and_special_tokens_never_follow(tokenizer: LLTokenizer) -> None:
    found = allowed(begin(tokenizer, regex("(.|\n)*")), [])
    assert max(found) < 512 and not {0, 1} & set(found) and EOS in found


def test_tokens_that_do_not_match(tokenizer: LLTokenizer) -> None:
    [a], [b] = tokenizer.tokenize_str("a"), tokenizer.tokenize_str("b")
    state = begin(tokenizer, regex("a+"))
    state.follow([a, b])
    assert not state.is_over([a, b])
    with pytest.raises(GrammarError, match="tokens so far"):
        state.mask([a, b])
    with pytest.raises(GrammarError, match="tokens so far"):
        state.fork().mask([a, b])
    with pytest.raises(ValueError, match="cannot have 1"):
        state.follow([a])


def test_a_mask_that_takes_too_long(tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_state, "MAX_MASK_CPU_S", 0.0)
    with pytest.raises(GrammarError, match="s for a token"):
        begin(tokenizer, JSON).mask([])
