"""Token ids to text as they come, never part of a character; and the text of single tokens for log-probabilities.

The offset method of TGI and vLLM: decode a short window of tokens whose head has been put out already (a decoder may
treat the first token of a text otherwise), and put out what is new. An unfinished character shows as U+FFFD at the end:
byte-level decoders give one for it, byte-fallback decoders up to three. So at most three are held back, and bytes that
are no UTF-8 at all do not hold up the text. The pieces put together equal the full decode; the one exception is a
byte-fallback decoder with bytes that turn out invalid after a character was complete (it takes the character back).
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
CONTEXT_IDS = 6
"""Prompt tokens that go before the output, so that its first token keeps its leading space."""
TRIM_AT = 24
FORCE_TRIM_AT = 96
MAX_PARTIAL = 3


class Detokenizer:
    """Incremental detokenization of one sample."""

    __slots__ = ("_emitted", "_ids", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt_ids[-CONTEXT_IDS:])
        self._emitted = len(self._decode().rstrip(REPLACEMENT)) if self._ids else 0
        """Characters of the window's text that have been put out."""

    def add(self, token_id: int) -> str:
        """The text that became certain with this token; often empty inside a character."""
        self._ids.append(token_id)
        text = self._decode()
        partial = len(text) - len(text.rstrip(REPLACEMENT))
        end = len(text) - min(partial, MAX_PARTIAL)
        delta = text[self._emitted : end]
        self._emitted = max(self._emitted, end)
        if len(self._ids) >= TRIM_AT and (not partial or len(self._ids) >= FORCE_TRIM_AT):
            self._trim()
        return delta

    def flush(self) -> str:
        """What is still held back, once no token will follow."""
        text = self._decode()
        delta = text[self._emitted :]
        self._emitted = len(text)
        return delta

    def _trim(self) -> None:
        held = len(self._decode()) - self._emitted
        self._ids = self._ids[-CONTEXT_IDS:]
        self._emitted = max(0, len(self._decode()) - held)

    def _decode(self) -> str:
        return str(self._tokenizer.decode(self._ids, skip_special_tokens=True))


def _byte_level_table() -> dict[str, int]:
    """GPT-2's map from printable characters to bytes (`bytes_to_unicode` of its encoder.py, turned round)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


class TokenTexts:
    """Text and bytes of single tokens, each worked out once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._byte_level = _byte_level_table() if "ByteLevel" in str(tokenizer.decoder) else None
        self._anchor = self._find_anchor()
        self._texts: dict[int, tuple[str, bytes]] = {}

    def get(self, token_id: int) -> tuple[str, bytes]:
        """(text, bytes) of a token, special ones too; part of a character is spelled "bytes:\\xe2", as OpenAI does."""
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
        """A token whose text stays the same whatever follows: before it a token keeps its leading space."""
        for text in ("a", "A", "x", "."):
            ids = list(self.tokenizer.encode(text, add_special_tokens=False).ids)
            if ids and self._decode(ids).strip() == text:
                return ids
        return []

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))
