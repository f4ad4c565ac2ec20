"""Grammars of every kind: matching outputs, refused grammars, and error messages of one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLTokenizer

from common.grammar import MAX_REASON_CHARS, GrammarError, compile_grammar, eos_token_ids, explore, load_tokenizer
from common.types import GrammarKind, StructuredOutput

MODEL = Path(__file__).parents[2] / "models/storyteller"
VOCAB = 2048


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return load_tokenizer(MODEL, VOCAB)


def matches(tokenizer: LLTokenizer, wanted: StructuredOutput, text: str) -> bool:
    """Returns whether `text` is a complete output."""
    matcher = compile_grammar(tokenizer, wanted)
    ids = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


OBJECT = (
    '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false}'
)


@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    [
        (StructuredOutput("json_schema", OBJECT),
         ['{"a":1}', '{"a": 1}', '{\n  "a": -20\n}'], ['{}', '{"a":"1"}', '1']),
        (StructuredOutput("json_schema", "true"), ["1", "[]"], ["", "x"]),
        (StructuredOutput("json_object"), ['{}', '{"x": [1, null, {"y": "é"}]}'], ['[]', '"a"', '{"x":}']),
        (StructuredOutput("regex", "[a-c]+x?"), ["a", "abcx"], ["", "x", "ax "]),
        (StructuredOutput("choice", options=("on", "only", 'a "b"\n', "é")),
         ["on", "only", 'a "b"\n', "é"], ["onl", "a"]),
        (StructuredOutput("lark", 'start: "<" num ("," num)* ">"\nnum: /[0-9]+/'), ["<1>", "<1,22>"], ["<>", "<1,>"]),
    ],
    ids=lambda value: value.kind if isinstance(value, StructuredOutput) else "",
)  # fmt: skip
def test_what_matches(tokenizer: LLTokenizer, wanted: StructuredOutput, good: list[str], bad: list[str]) -> None:
    for text in good:
        assert matches(tokenizer, wanted, text), text
    for text in bad:
        assert not matches(tokenizer, wanted, text), text


@pytest.mark.parametrize("whitespace", [" " * 2, " " * 40, "\n" * 2, "\n" + " " * 17])
def test_whitespace_is_bounded(tokenizer: LLTokenizer, whitespace: str) -> None:
    wanted = StructuredOutput("json_schema", OBJECT)
    assert not matches(tokenizer, wanted, '{"a":' + whitespace + "1}")
    assert matches(tokenizer, wanted, '{"a":\n' + " " * 16 + "1}")


@pytest.mark.parametrize(
    ("kind", "source", "says"),
    [
        ("regex", "(((", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", r"[^\s\S]", "matches no text"),
        ("json_schema", '{"a":', "EOF"),
        ("json_schema", "[1]", "object"),
        ("json_schema", '{"not": {}}', "not"),
        ("json_schema", '{"$ref": "http://example.com/x"}', "example.com"),
        ("json_schema", '{"$ref": "file:///etc/passwd"}', "not present"),
        ("json_schema", "false", "Unsatisfiable"),
        ("lark", "start: foo", "foo"),
        ("lark", "start: " + "(" * 2000, "nested"),
        ("regex", "(a?){3000}a{3000}\n", "comp"),
    ],
)
def test_what_cannot_be_used(tokenizer: LLTokenizer, kind: GrammarKind, source: str, says: str) -> None:
    with pytest.raises(GrammarError) as caught:
        explore(tokenizer, compile_grammar(tokenizer, StructuredOutput(kind, source)))
    assert says in str(caught.value)
    assert str(caught.value).isprintable() and len(str(caught.value)) <= MAX_REASON_CHARS + 30


def test_a_grammar_that_becomes_too_complex_is_found_out(tokenizer: LLTokenizer) -> None:
    start = compile_grammar(tokenizer, StructuredOutput("regex", "(a{1000}){1000}"))
    with pytest.raises(GrammarError, match="after a few tokens"):
        explore(tokenizer, start)


def test_exploring_does_not_move_the_grammar(tokenizer: LLTokenizer) -> None:
    start = compile_grammar(tokenizer, StructuredOutput("regex", "abc"))
    before = start.compute_bitmask()
    explore(tokenizer, start)
    assert start.compute_bitmask() == before


def test_logits_wider_or_narrower_than_the_tokenizer(tokenizer: LLTokenizer) -> None:
    for width in (1000, VOCAB, 3001):
        wide = load_tokenizer(MODEL, width)
        assert wide.vocab_size == max(width, VOCAB)
        mask = np.frombuffer(compile_grammar(wide, StructuredOutput("regex", ".*")).compute_bitmask(), np.uint8)
        assert not np.unpackbits(mask, bitorder="little")[VOCAB:].any()


def test_end_tokens_are_those_of_the_first_file_that_names_any(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(MODEL / name, tmp_path)
    assert eos_token_ids(tmp_path) == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert eos_token_ids(tmp_path) == (5, 7)
    assert load_tokenizer(tmp_path, VOCAB).eos_tokens == [5, 7]
    (tmp_path / "generation_config.json").write_text("{}")
    assert eos_token_ids(tmp_path) == (2,)


@pytest.mark.parametrize("content", [None, "{}", "{not json"])
def test_a_directory_without_a_tokenizer(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(GrammarError, match="tokenizer"):
        load_tokenizer(tmp_path, VOCAB)
