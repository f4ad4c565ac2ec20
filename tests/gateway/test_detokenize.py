"""Incremental detokenization: parts consist of whole characters, and together they are equal to the full decode."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from gateway.request.detokenize import ByteDetokenizer, Detokenizer, Detokenizers, Detokenizing, TokenTexts
from testing.gateway.parts import BOS_ID, EOS_ID, VOCAB_SIZE, make_tokenizer

BYTE_LEVEL = make_tokenizer()
TEXTS = st.text(alphabet=st.sampled_from("ab mill\n\té€ü漢字\U0001f600\U0001f468\u200d\ufffd"), max_size=60)


def make_byte_fallback() -> Tokenizer:
    """Returns a tokenizer like Llama's: words have a space mark, and characters outside the vocabulary are bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁the", "▁mill", "a", "b", "m"]
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken(p, special=True) for p in pieces[:3]])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


BYTE_FALLBACK = make_byte_fallback()


def pieces_of(detokenizer: Detokenizing, ids: list[int]) -> list[str]:
    return [*map(detokenizer.add, ids), detokenizer.flush()]


def stream(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    return pieces_of(Detokenizer(tokenizer, prompt or []), ids)


SHORT_WAY = Detokenizers(BYTE_LEVEL)


def test_only_byte_level_tokenizers_have_the_short_way() -> None:
    assert isinstance(SHORT_WAY.begin(), ByteDetokenizer)
    assert isinstance(Detokenizers(BYTE_FALLBACK).begin(), Detokenizer)


@given(TEXTS)
@settings(max_examples=300, deadline=None)
def test_the_short_way_puts_out_whole_characters_as_soon_as_they_are_there(text: str) -> None:
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    pieces, sent = pieces_of(SHORT_WAY.begin(), ids), ""
    for count, piece in enumerate(pieces[:-1], 1):
        sent += piece
        known = BYTE_LEVEL.decode(ids[:count])
        assert sent == known or (known.endswith("\ufffd") and known.startswith(sent))
    assert sent == text and not pieces[-1]


@given(st.lists(st.integers(0, VOCAB_SIZE + 2), max_size=150), st.integers(0, 20))
@settings(max_examples=300, deadline=None)
def test_the_short_way_gives_the_full_decode_of_any_ids(ids: list[int], prompt_len: int) -> None:
    assert "".join(pieces_of(SHORT_WAY.begin(), ids)) == BYTE_LEVEL.decode(ids, skip_special_tokens=True)
    prompt = BYTE_LEVEL.encode("mill " * prompt_len, add_special_tokens=False).ids
    assert "".join(pieces_of(SHORT_WAY.begin(prompt), ids)) == BYTE_LEVEL.decode(ids, skip_special_tokens=True)


@given(TEXTS)
@settings(max_examples=300, deadline=None)
def test_pieces_of_a_text_are_the_text_and_never_part_of_a_character(text: str) -> None:
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    pieces = stream(BYTE_LEVEL, ids)
    assert "".join(pieces) == text == BYTE_LEVEL.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=150))
@settings(max_examples=300, deadline=None)
def test_any_ids_invalid_bytes_among_them_give_the_full_decode(ids: list[int]) -> None:
    assert "".join(stream(BYTE_LEVEL, ids)) == BYTE_LEVEL.decode(ids, skip_special_tokens=True)


@given(TEXTS.map(lambda text: text.replace("\ufffd", "")))
@settings(max_examples=300, deadline=None)
def test_byte_fallback_holds_characters_together_too(text: str) -> None:
    ids = [token for char in text for token in [3 + b for b in char.encode()]]
    pieces = stream(BYTE_FALLBACK, ids)
    assert "".join(pieces) == BYTE_FALLBACK.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_continuation_keeps_the_space_before_its_first_word() -> None:
    the, mill = BYTE_FALLBACK.token_to_id("▁the"), BYTE_FALLBACK.token_to_id("▁mill")
    assert "".join(stream(BYTE_FALLBACK, [mill], prompt=[1, the])) == " mill"
    assert BYTE_FALLBACK.decode([mill]) == "mill"


def test_a_character_that_the_prompt_began_is_completed_in_the_output() -> None:
    prompt = BYTE_LEVEL.encode("x").ids + BYTE_LEVEL.encode("€", add_special_tokens=False).ids[:1]
    rest = BYTE_LEVEL.encode("€", add_special_tokens=False).ids[1:]
    assert "".join(stream(BYTE_LEVEL, rest, prompt=prompt)) == "€"
    assert "".join(pieces_of(SHORT_WAY.begin(prompt), rest)) == "€"


def test_bytes_that_are_no_text_do_not_hold_up_the_stream() -> None:
    bad = BYTE_FALLBACK.token_to_id("<0xFF>")
    pieces = stream(BYTE_FALLBACK, [bad] * 500)
    assert "".join(pieces) == "\ufffd" * 500 and sum(map(len, pieces[:250])) > 200


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK])
def test_texts_of_single_tokens_put_together_are_the_text(tokenizer: Tokenizer) -> None:
    texts = TokenTexts(tokenizer)
    if tokenizer is BYTE_LEVEL:
        ids = tokenizer.encode("the old mill \U0001f600", add_special_tokens=False).ids
        assert b"".join(texts.get(i)[1] for i in ids).decode() == "the old mill \U0001f600"
        assert texts.get(EOS_ID) == ("</s>", b"</s>") and texts.get(BOS_ID)[0] == "<s>"
    else:
        assert texts.get(tokenizer.token_to_id("▁mill")) == (" mill", b" mill")
        assert texts.get(tokenizer.token_to_id("<0xE2>")) == ("bytes:\\xe2", b"\xe2")
