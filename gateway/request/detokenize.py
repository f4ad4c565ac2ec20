"""Converts token ids to text as they arrive, without splitting characters. Also returns the texts of single tokens.

`Detokenizer` uses the offset method of TGI and vLLM: it decodes a short window of tokens whose beginning has already
been output, because a decoder may treat the first token of a text differently, and outputs the new part of the text. An
unfinished character appears as U+FFFD at the end and is held back. If it is not finished after three more tokens, only
the last three characters stay held back, because a character has at most four bytes. The pieces can differ from the
full decode if the decoder turns a whole run of bytes into U+FFFD because one byte in the run is invalid.

`ByteDetokenizer` is a fast path for byte-level decoders, in which a token always has the same bytes. It keeps only the
bytes of an unfinished character.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Mapping, Sequence
from typing import Protocol

from tokenizers import Tokenizer, decoders

REPLACEMENT = "\ufffd"
CONTEXT_IDS = 6
"""The smallest number of tokens to which the window is trimmed. These tokens precede the new output, so that the first
new token keeps its leading space.
"""
MAX_CONTEXT_IDS = 12
TRIM_AT = 24
FORCE_TRIM_AT = 96
MAX_PARTIAL = 3


class Detokenizing(Protocol):
    """The interface of an incremental detokenizer for one sample."""

    def add(self, token_id: int) -> str:
        """Returns the text that is complete after this token. An incomplete character at the end is held back."""

    def flush(self) -> str:
        """Returns the text that was held back."""


class Detokenizers:
    """A factory of detokenizers for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[bool, TokenBytes] = {}
        if isinstance(tokenizer.decoder, decoders.ByteLevel):
            self._bytes = {skip: TokenBytes(tokenizer, skip_special=skip) for skip in (True, False)}

    def begin(
        self,
        prompt_ids: Sequence[int] = (),
        shown_special: Mapping[int, str] | None = None,
        *,
        skip_special: bool = True,
    ) -> Detokenizing:
        """Returns a detokenizer for the output of one sample, which follows the prompt. With `skip_special`, special
        tokens are left out, except those in `shown_special`, which maps token ids to texts.
        """
        plain: Detokenizing
        if not self._bytes:
            plain = Detokenizer(self._tokenizer, prompt_ids, skip_special=skip_special)
        else:
            plain = ByteDetokenizer(self._bytes[skip_special], prompt_ids)
        return ShowingDetokenizer(plain, shown_special) if shown_special and skip_special else plain


class TokenBytes:
    """A cache of each token's bytes under a byte-level decoder. With `skip_special`, special tokens have no bytes."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._table = _byte_level_table()
        added = tokenizer.get_added_tokens_decoder().values() if skip_special else ()
        self._special = {token.content for token in added if token.special}
        self.known: dict[int, tuple[bytes, str | None]] = {}
        """Maps a token id to its bytes and their text. The text is None if the bytes are not whole characters."""

    def find(self, token_id: int) -> tuple[bytes, str | None]:
        """Returns the token's entry in `known`, which it creates if it is missing."""
        if (found := self.known.get(token_id)) is None:
            raw = self._raw(self._tokenizer.id_to_token(token_id))
            try:
                found = raw, raw.decode()
            except UnicodeDecodeError:
                found = raw, None
            self.known[token_id] = found
        return found

    def _raw(self, token: str | None) -> bytes:
        if token is None or token in self._special:
            return b""
        table = self._table
        return bytes(table[c] for c in token) if all(c in table for c in token) else token.encode()


class ByteDetokenizer:
    """A detokenizer for byte-level decoders. Invalid UTF-8 becomes U+FFFD, as in the tokenizer's own decode."""

    __slots__ = ("_bytes", "_held", "_known")

    def __init__(self, token_bytes: TokenBytes, prompt_ids: Sequence[int] = ()) -> None:
        self._bytes = token_bytes
        self._known = token_bytes.known
        self._held = b""
        """The bytes of an unfinished character, at most three."""
        for token_id in prompt_ids[-MAX_CONTEXT_IDS:]:
            self.add(token_id)

    def add(self, token_id: int) -> str:
        raw, text = self._known.get(token_id) or self._bytes.find(token_id)
        if text is not None and not self._held:
            return text
        data = self._held + raw
        text, used = utf_8_decode(data, "replace", False)
        self._held = data[used:]
        return text

    def flush(self) -> str:
        text, self._held = utf_8_decode(self._held, "replace", True)[0], b""
        return text


class Detokenizer:
    """A detokenizer for any decoder."""

    __slots__ = ("_emitted", "_ids", "_pending", "_skip_special", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._ids = list(prompt_ids[-MAX_CONTEXT_IDS:])
        self._ids, text = self._context()
        self._emitted = len(text.rstrip(REPLACEMENT))
        """Number of characters of the window's text that have been output."""
        self._pending = 0
        """Number of tokens since the text last ended with a whole character."""

    def add(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids)
        whole = len(text.rstrip(REPLACEMENT))
        self._pending = self._pending + 1 if whole < len(text) else 0
        end = whole if self._pending <= MAX_PARTIAL else max(whole, len(text) - MAX_PARTIAL)
        delta = text[self._emitted : end]
        self._emitted = max(self._emitted, end) if self._pending else end
        if len(self._ids) >= TRIM_AT and (not self._pending or len(self._ids) >= FORCE_TRIM_AT):
            self._trim(len(text) - self._emitted)
        return delta

    def flush(self) -> str:
        text = self._decode(self._ids)
        delta = text[self._emitted :]
        self._emitted = len(text)
        return delta

    def _trim(self, num_held: int) -> None:
        """Drops all ids before the context. The last `num_held` characters of the text have not been output."""
        self._ids, text = self._context()
        self._emitted = max(0, len(text) - num_held)

    def _context(self) -> tuple[list[int], str]:
        """Returns the ids and the text of the last few tokens. The text begins with a whole character if possible."""
        for count in range(CONTEXT_IDS, MAX_CONTEXT_IDS + 1):
            text = self._decode(self._ids[-count:])
            if not text.startswith(REPLACEMENT):
                return self._ids[-count:], text
        return self._ids[-MAX_CONTEXT_IDS:], text

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._skip_special))


class ShowingDetokenizer:
    """A detokenizer that adds the texts of some special tokens to the output of another detokenizer."""

    __slots__ = ("_plain", "_shown")

    def __init__(self, plain: Detokenizing, shown: Mapping[int, str]) -> None:
        self._plain = plain
        self._shown = shown

    def add(self, token_id: int) -> str:
        if (mark := self._shown.get(token_id)) is not None:
            return self._plain.flush() + mark
        return self._plain.add(token_id)

    def flush(self) -> str:
        return self._plain.flush()


def _byte_level_table() -> dict[str, int]:
    """Returns GPT-2's map from printable characters to bytes (the inverse of `bytes_to_unicode` in its encoder.py)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


class TokenTexts:
    """A cache of the texts and bytes of single tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._byte_level = _byte_level_table() if "ByteLevel" in str(tokenizer.decoder) else None
        self._anchor = self._find_anchor()
        self._texts: dict[int, tuple[str, bytes]] = {}

    def get(self, token_id: int) -> tuple[str, bytes]:
        """Returns the text and the bytes of a token, which may be special. If the token contains an incomplete
        character, the text shows the bytes, if they are known, in the form that OpenAI's API uses, such as
        "bytes:\\xe2".
        """
        found = self._texts.get(token_id)
        if found is None:
            found = self._texts[token_id] = self._work_out(token_id)
        return found

    def _work_out(self, token_id: int) -> tuple[str, bytes]:
        anchor_text = self._decode(self._anchor)
        text = self._decode([*self._anchor, token_id])[len(anchor_text) :]
        if REPLACEMENT not in text:
            return text, text.encode()
        raw = self._raw_bytes(self.tokenizer.id_to_token(token_id) or "")
        return (text, text.encode()) if raw is None else ("bytes:" + "".join(f"\\x{b:02x}" for b in raw), raw)

    def _raw_bytes(self, token: str) -> bytes | None:
        if len(token) == 6 and token.startswith("<0x"):
            return bytes([int(token[3:5], 16)])
        table = self._byte_level
        if table is None or any(c not in table for c in token):
            return None
        return bytes(table[c] for c in token)

    def _find_anchor(self) -> list[int]:
        """Returns the ids of a text after which a token keeps its leading space, or no ids if none of a few texts is
        suitable.
        """
        for text in ("a", "A", "x", "."):
            ids = list(self.tokenizer.encode(text, add_special_tokens=False).ids)
            if ids and self._decode(ids).strip() == text:
                return ids
        return []

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))
