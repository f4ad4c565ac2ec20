"""What a client gets back: small frozen dataclasses, made from protobuf here and nowhere else in this package."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from common.convert import finish_reason_from_pb, logprob_from_pb, sources_from_pb, timings_from_pb
from common.errors import Internal
from common.types import FinishReason, Timings, TokenLogprob
from protos.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. cached + computed + transferred = prompt_tokens."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV was found under its prefix hash."""
    computed_tokens: int
    transferred_tokens: int
    """Prompt tokens whose KV was copied from another host."""
    handed_over_tokens: int
    """Token positions whose KV went from prefill to decode."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One message of a stream. The last one has `finish_reason`, `usage` and `timings`."""

    text: str
    """New text; never part of a character."""
    token_ids: tuple[int, ...]
    """New tokens; their text may come with a later piece."""
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token or stop string that ended the text; None for the model's own end or a length limit."""
    usage: Usage | None = None
    timings: Timings | None = None
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Completion:
    """The whole continuation of one prompt."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None
    usage: Usage
    timings: Timings
    logprobs: tuple[TokenLogprob, ...]
    """One per token; empty unless `logprobs` was asked for."""
    prompt_logprobs: tuple[TokenLogprob, ...]
    """One per prompt token but the first; empty unless `prompt_logprobs` was asked for."""
    request_id: str


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One model that the gateway serves."""

    id: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


def piece_from_pb(message: pb.GenerateResponse) -> Piece:
    """One streamed message."""
    return Piece(
        text=message.text_delta,
        token_ids=tuple(message.token_ids),
        logprobs=tuple(map(logprob_from_pb, message.logprobs)),
        prompt_logprobs=tuple(map(logprob_from_pb, message.prompt_logprobs)),
        finish_reason=finish_reason_from_pb(message.finish_reason),
        stop_reason=_stop_reason(message),
        usage=_usage(message.usage) if message.HasField("usage") else None,
        timings=timings_from_pb(message.timings) if message.HasField("timings") else None,
        request_id=message.request_id,
    )


def _stop_reason(message: pb.GenerateResponse) -> int | str | None:
    match message.WhichOneof("stop_reason"):
        case "stop_token_id":
            return message.stop_token_id
        case "stop_string":
            return message.stop_string
    return None


def _usage(message: pb.Usage) -> Usage:
    sources = sources_from_pb(message.sources)
    return Usage(
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        cached_tokens=sources.cached,
        computed_tokens=sources.computed,
        transferred_tokens=sources.transferred,
        handed_over_tokens=message.handed_over_tokens,
    )


def join(pieces: Iterable[Piece]) -> Completion:
    """The completion that a whole stream amounts to. Raises Internal if the stream ended without a last piece."""
    parts = tuple(pieces)
    last = parts[-1] if parts else None
    if last is None or last.finish_reason is None:
        raise Internal("the stream ended without a finish reason")
    return Completion(
        text="".join(part.text for part in parts),
        token_ids=tuple(token for part in parts for token in part.token_ids),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        usage=last.usage or Usage(0, 0, 0, 0, 0, 0),
        timings=last.timings or Timings(),
        logprobs=tuple(item for part in parts for item in part.logprobs),
        prompt_logprobs=tuple(item for part in parts for item in part.prompt_logprobs),
        request_id=last.request_id,
    )


def model_from_pb(message: pb.Model) -> ModelInfo:
    return ModelInfo(message.id, message.max_model_len, message.vocab_size, tuple(message.eos_token_ids))
