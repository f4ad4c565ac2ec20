"""Special tokens that a parser needs are part of the text, and do not change the rest of the text."""

from __future__ import annotations

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from gateway.request.detokenize import Detokenizers
from testing.gateway.parts import make_tokenizer

MARKS = ("<tool_call>", "</tool_call>", "<hidden>")


def byte_level() -> Tokenizer:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    return tokenizer


def with_space_marks() -> Tokenizer:
    """Returns a tokenizer like Llama's and Mistral's: the first token of a word includes the space before it."""
    words = ["<unk>", "<s>", *(f"<0x{b:02X}>" for b in range(256)), "▁the", "▁mill", "▁[", "{", "a", "▁"]
    tokenizer = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>"))
    special = [AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", *MARKS)]
    tokenizer.add_special_tokens(special)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, with_space_marks])
def test_shown_tokens_are_in_the_text_and_hidden_ones_are_not(make: object) -> None:
    tokenizer: Tokenizer = make()  # type: ignore[operator]
    ids = {mark: tokenizer.token_to_id(mark) for mark in MARKS}
    shown = {ids[mark]: mark for mark in MARKS[:2]}
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    plain = [
        i for i in range(tokenizer.get_vocab_size()) if i not in special and "0x" not in str(tokenizer.id_to_token(i))
    ]
    rng = random.Random(4)
    for _ in range(60):
        drawn = [rng.choice(plain[:200]) if rng.random() < 0.7 else rng.choice(list(ids.values())) for _ in range(24)]
        prompt = [plain[0], plain[1]]
        detokenizers = Detokenizers(tokenizer)
        with_marks, without = detokenizers.begin(prompt, shown), detokenizers.begin(prompt)
        text = "".join(map(with_marks.add, drawn)) + with_marks.flush()
        expected = "".join(map(without.add, drawn)) + without.flush()
        assert "<hidden>" not in text
        bare = text
        for mark in MARKS[:2]:
            assert text.count(mark) == drawn.count(ids[mark])
            bare = bare.replace(mark, "")
        if "\ufffd" not in expected:
            assert bare == expected
    assert detokenizers.begin([], {}).add(ids["<tool_call>"]) == ""
