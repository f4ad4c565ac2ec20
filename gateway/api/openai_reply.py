"""Builds answers in OpenAI's format, as bytes.

Chunks are ASCII, because readers that split lines at Unicode line breaks would break a chunk at U+2028. In addition to
OpenAI's fields, a complete answer and the end of a stream contain a `looseleaf` object with the source of the prompt's
KV and the timings.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from common.errors import LooseleafError
from common.types import FinishReason
from gateway.intake.resolved_request import ResolvedRequest
from gateway.request.delta import Delta, Summary
from gateway.request.detokenize import Detokenizer, TokenTexts
from gateway.tools.output_reader import OutputReader
from protos.v1 import types_pb2 as pb

DONE = b"data: [DONE]\n\n"
_PIECE = 64
"""Number of prompt tokens whose log-probabilities are formatted at once."""


def error_body(error: LooseleafError) -> dict[str, Any]:
    """Returns an error in the format of OpenAI's API. `param` is the first invalid field, or None."""
    param = error.violations[0].field if error.violations else None
    return {"error": {"message": error.message, "type": error.kind, "param": param, "code": error.code}}


def dumps(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


def usage_of(summaries: Sequence[Summary]) -> dict[str, Any]:
    prompt = sum(s.prompt_tokens for s in summaries)
    completion = sum(s.completion_tokens for s in summaries)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(s.sources.cached for s in summaries)},
    }


def account_of(summaries: Sequence[Summary]) -> dict[str, Any]:
    """Returns the `looseleaf` object. For several prompts, tokens and attempts are sums and times are maxima."""
    times = {
        name: round(max(getattr(s.timings, f"{name}_ns") for s in summaries) / 1e6, 3)
        for name in ("queue", "prefill", "hand_over", "decode")
    }
    return {
        "prompt_tokens_cached": sum(s.sources.cached for s in summaries),
        "prompt_tokens_computed": sum(s.sources.computed for s in summaries),
        "prompt_tokens_transferred": sum(s.sources.transferred for s in summaries),
        "handed_over_tokens": sum(s.handed_over_tokens for s in summaries),
        "times_ms": times,
        "attempts": sum(s.attempts for s in summaries),
    }


def finish_name(reason: FinishReason | None) -> str | None:
    return None if reason is None else reason.value


def stop_reason(delta: Delta, eos: frozenset[int]) -> str | int | None:
    """Returns vLLM's stop_reason: the stop string or stop token id that ended the output, or None if an end-of-sequence
    token or a length limit ended it.
    """
    if delta.stop_string is not None:
        return delta.stop_string
    return None if delta.stop_token_id in eos else delta.stop_token_id


class LogprobFormat:
    """A formatter of log-probabilities for completions, chat and vLLM's prompt_logprobs."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._prompts: dict[int, bytes] = {}

    def completion(
        self, items: Sequence[pb.TokenLogprob], offset: int, most: int | None = None
    ) -> tuple[dict[str, Any], int]:
        """Returns OpenAI's object for tokens whose text begins at `offset`, with at most `most` likely tokens for each,
        and the offset after them. Offsets count characters.
        """
        tokens, values, tops, offsets = [], [], [], []
        for item in items:
            text, raw = self._texts.get(item.token_id)
            tokens.append(text)
            values.append(_finite(item.logprob))
            tops.append(self._top(item, most))
            offsets.append(offset)
            offset += len(raw.decode(errors="ignore"))
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}, offset

    def echoed(self, request: ResolvedRequest, items: Sequence[pb.TokenLogprob], most: int) -> dict[str, Any]:
        """Returns the log-probabilities of an echoed prompt, with at most `most` likely tokens for each token. The
        first token has no log-probability.
        """
        found, _ = self.completion(items, 0, most)
        detokenizer, offset, offsets = Detokenizer(self._texts.tokenizer), 0, []
        for token_id in request.prompt_ids:
            offsets.append(offset)
            offset += len(detokenizer.add(token_id))
        first = self._texts.get(request.prompt_ids[0])[0]
        return {
            "tokens": [first, *found["tokens"]],
            "token_logprobs": [None, *found["token_logprobs"]],
            "top_logprobs": [None, *found["top_logprobs"]],
            "text_offset": offsets,
        }

    def chat(self, items: Sequence[pb.TokenLogprob]) -> dict[str, Any]:
        content = []
        for item in items:
            entry = self._entry(item.token_id, item.logprob)
            entry["top_logprobs"] = [self._entry(token, value) for token, value in _tops(item)]
            content.append(entry)
        return {"content": content, "refusal": None}

    def prompt(self, number: int, items: Sequence[pb.TokenLogprob], most: int) -> Iterator[bytes]:
        """Yields the log-probabilities of prompt `number` in vLLM's format, as pieces of JSON: null for the first token
        and, for each later token, a map from id to logprob, rank and text. The map has at most `most` likely tokens,
        and the token itself. A second call for the same prompt formats nothing.
        """
        if (found := self._prompts.get(number)) is not None:
            yield found
            return
        pieces = [b"[null"]
        for start in range(0, len(items), _PIECE):
            pieces.append(b"," + dumps(self._prompt_maps(items[start : start + _PIECE], most))[1:-1])
            yield b""
        pieces.append(b"]")
        self._prompts[number] = b"".join(pieces)
        yield self._prompts[number]

    def _prompt_maps(self, items: Sequence[pb.TokenLogprob], most: int) -> list[dict[str, Any]]:
        answer: list[dict[str, Any]] = []
        for item in items:
            entries = {
                str(token): {"logprob": _finite(value), "rank": rank, "decoded_token": self._texts.get(token)[0]}
                for rank, (token, value) in enumerate(_tops(item, most), 1)
            }
            text = self._texts.get(item.token_id)[0]
            entries[str(item.token_id)] = {"logprob": _finite(item.logprob), "rank": item.rank, "decoded_token": text}
            answer.append(entries)
        return answer

    def _top(self, item: pb.TokenLogprob, most: int | None) -> dict[str, float]:
        """Returns the log-probabilities of the most likely tokens and of the chosen token by their texts, as vLLM
        does.
        """
        top = {self._texts.get(token)[0]: _finite(value) for token, value in _tops(item, most)}
        top.setdefault(self._texts.get(item.token_id)[0], _finite(item.logprob))
        return top

    def _entry(self, token_id: int, value: float) -> dict[str, Any]:
        text, raw = self._texts.get(token_id)
        return {"token": text, "logprob": _finite(value), "bytes": list(raw)}


def _tops(item: pb.TokenLogprob, most: int | None = None) -> list[tuple[int, float]]:
    """Returns the ids and log-probabilities of the most likely tokens, at most `most`, in descending order."""
    return list(zip(item.top_token_ids, item.top_logprobs, strict=True))[:most]


def _finite(logprob: float) -> float:
    """Returns the log-probability, but at least -9999, which OpenAI's API returns for a very unlikely token. JSON
    cannot represent minus infinity.
    """
    return max(logprob, -9999.0)


@dataclass(slots=True)
class Choice:
    """A choice of an answer while it is assembled: the output of one sample of one prompt."""

    index: int
    """The prompt's number times the samples per prompt, plus the sample's number."""
    request: ResolvedRequest
    text: list[str] = field(default_factory=list)
    logprobs: list[pb.TokenLogprob] = field(default_factory=list)
    prompt_logprobs: Sequence[pb.TokenLogprob] = ()
    last: Delta | None = None
    offset: int = 0
    reader: OutputReader | None = None
    """The reader that splits the text into reasoning, content and tool calls, or None if the whole text is content."""
    token_ids: list[int] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        self.token_ids += delta.token_ids
        self.text.append(delta.text)
        self.logprobs += delta.logprobs
        if delta.finish_reason is not None:
            self.last = delta


@dataclass(frozen=True, slots=True)
class Envelope:
    """The fields that the complete answer and all chunks of one HTTP request share."""

    answer_id: str
    kind: str
    """The `object` field of the complete answer. A chat's chunks have a different value."""
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: Iterable[Iterable[bytes]], summaries: Sequence[Summary], **more: Any) -> Iterator[bytes]:
        """Yields the complete answer in pieces. Each choice is given as pieces of JSON."""
        head = {"id": self.answer_id, "object": self.kind, "created": self.created, "model": self.model}
        yield dumps(head)[:-1] + b',"choices":['
        for number, choice in enumerate(choices):
            if number:
                yield b","
            yield from choice
        tail = {"usage": usage_of(summaries), "looseleaf": account_of(summaries), **more}
        yield b"]," + dumps(tail)[1:]

    def chunk_head(self) -> str:
        kind = "chat.completion.chunk" if self.kind == "chat.completion" else self.kind
        return (
            f'data: {{"id":{quoted(self.answer_id)},"object":"{kind}","created":{self.created},'
            f'"model":{quoted(self.model)},"choices":['
        )


class ChunkWriter:
    """A builder of the chunks of one stream."""

    def __init__(self, envelope: Envelope, *, include_usage: bool) -> None:
        self._chat = envelope.kind == "chat.completion"
        self._head = envelope.chunk_head()
        self._usage = include_usage
        self._tail = ',"usage":null}\n\n' if include_usage else "}\n\n"
        """The text after the choices' closing bracket."""

    def count(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Sets the usage that the next chunks show (vLLM's continuous_usage_stats)."""
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }
        self._tail = f',"usage":{json.dumps(usage)}}}\n\n'

    def role(self, index: int, more: str = "") -> bytes:
        """Returns the first chunk of a chat's choice. `more` contains further members of the choice, as JSON."""
        delta = '"delta":{"role":"assistant","content":""}'
        choice = f'{{"index":{index},{delta},"logprobs":null,"finish_reason":null{more}}}'
        return f"{self._head}{choice}]{self._tail}".encode()

    def text(self, index: int, text: str, logprobs: dict[str, Any] | None = None, more: str = "") -> bytes:
        """Returns a chunk with text. This is the hot path. `more` contains further members of the choice, as JSON."""
        shown = "null" if logprobs is None else json.dumps(logprobs)
        body = f'"delta":{{"content":{quoted(text)}}}' if self._chat else f'"text":{quoted(text)}'
        choice = f'{{"index":{index},{body},"logprobs":{shown},"finish_reason":null{more}}}'
        return f"{self._head}{choice}]{self._tail}".encode()

    def delta(
        self, index: int, fields: Mapping[str, Any], logprobs: dict[str, Any] | None = None, more: str = ""
    ) -> bytes:
        """Returns a chunk of a chat with these fields of the message. `more` contains further members of the choice, as
        JSON.
        """
        shown = "null" if logprobs is None else json.dumps(logprobs)
        body = f'"delta":{json.dumps(fields)},"logprobs":{shown},"finish_reason":null{more}'
        return f'{self._head}{{"index":{index},{body}}}]{self._tail}'.encode()

    def finish(self, index: int, ending: Mapping[str, Any], summaries: Sequence[Summary] | None) -> bytes:
        """Returns a choice's last chunk, with the fields of `ending`. If `summaries` is not None, the chunk also has
        the `looseleaf` object.
        """
        body = '"delta":{}' if self._chat else '"text":""'
        choice = f'{{"index":{index},{body},"logprobs":null,{json.dumps(ending)[1:]}]'
        extra = "" if summaries is None else f',"looseleaf":{json.dumps(account_of(summaries))}'
        return f"{self._head}{choice}{extra}{self._tail}".encode()

    def usage(self, summaries: Sequence[Summary]) -> bytes:
        """Returns the chunk that stream_options.include_usage requests."""
        account, usage = json.dumps(account_of(summaries)), json.dumps(usage_of(summaries))
        return f'{self._head}],"looseleaf":{account},"usage":{usage}}}\n\n'.encode()
