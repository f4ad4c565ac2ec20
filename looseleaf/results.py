"""The results that a client receives, as frozen dataclasses, and their conversion from protobuf."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from common.convert import finish_reason_from_pb, logprob_from_pb, sources_from_pb, timings_from_pb
from common.errors import Internal
from common.types import FinishReason, Timings, TokenLogprob
from protos.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class Usage:
    """The token counts of one request. `cached_tokens + computed_tokens == prompt_tokens`."""

    prompt_tokens: int
    completion_tokens: int
    """Output tokens of all samples."""
    cached_tokens: int
    """Prompt tokens whose KV was found under its prefix hash."""
    computed_tokens: int
    transferred_tokens: int
    """Token positions whose KV was copied to the decode worker's host, because prefill ran on another host."""
    handed_over_tokens: int
    """Token positions whose KV went from prefill to decode."""


@dataclass(frozen=True, slots=True)
class Delta:
    """A message of a stream, about one sample. A sample's last delta has its `finish_reason`; the request's last delta
    also has `usage` and `timings`.
    """

    text: str
    """New text, in whole characters."""
    token_ids: tuple[int, ...]
    """New tokens. Their text may follow in a later delta."""
    index: int = 0
    """Number of the sample or beam within the request."""
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token or stop string that ended the text; None in other cases, such as an end-of-sequence token."""
    usage: Usage | None = None
    timings: Timings | None = None
    beam_score: float | None = None
    """Score of a beam, which arrives as one delta; None if this is not a beam search."""
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """One continuation of a prompt: one of `n` samples, or one beam of a beam search."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    """One log-probability per token; empty unless `logprobs` was requested."""
    beam_score: float | None = None
    """Sum of the beam's log-probabilities / length ** length_penalty; None if this is not a beam search."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of one prompt. The properties, such as `text` and `token_ids`, are those of the first sample, which is
    the only one if `n` is 1.
    """

    samples: tuple[Sample, ...]
    """At least one sample, in the order of the index."""
    usage: Usage
    timings: Timings
    prompt_logprobs: tuple[TokenLogprob, ...]
    """One log-probability per prompt token except the first; empty unless `prompt_logprobs` was requested."""
    request_id: str

    @property
    def text(self) -> str:
        return self.samples[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.samples[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.samples[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        return self.samples[0].stop_reason

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        return self.samples[0].logprobs

    @property
    def beam_score(self) -> float | None:
        return self.samples[0].beam_score


@dataclass(frozen=True, slots=True)
class Embedding:
    """The embedding of one text."""

    embedding: tuple[float, ...]
    """A vector of length 1 with fp32 values."""
    usage: Usage
    timings: Timings
    request_id: str


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One model that the gateway serves."""

    id: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    pooling: str
    """The method by which a text's hidden states become its embedding: last or mean."""
    parent: str | None = None
    """The base model if this model is a LoRA adapter, or None."""


def delta_from_pb(message: pb.GenerateResponse) -> Delta:
    """Converts one streamed message."""
    return Delta(
        text=message.text_delta,
        token_ids=tuple(message.token_ids),
        index=message.index,
        logprobs=tuple(map(logprob_from_pb, message.logprobs)),
        prompt_logprobs=tuple(map(logprob_from_pb, message.prompt_logprobs)),
        finish_reason=finish_reason_from_pb(message.finish_reason),
        stop_reason=_stop_reason(message),
        usage=usage_from_pb(message.usage) if message.HasField("usage") else None,
        timings=timings_from_pb(message.timings) if message.HasField("timings") else None,
        beam_score=message.beam_score if message.HasField("beam_score") else None,
        request_id=message.request_id,
    )


def _stop_reason(message: pb.GenerateResponse) -> int | str | None:
    match message.WhichOneof("stop_reason"):
        case "stop_token_id":
            return message.stop_token_id
        case "stop_string":
            return message.stop_string
    return None


def usage_from_pb(message: pb.Usage) -> Usage:
    sources = sources_from_pb(message.sources)
    return Usage(
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        cached_tokens=sources.cached,
        computed_tokens=sources.computed,
        transferred_tokens=sources.transferred,
        handed_over_tokens=message.handed_over_tokens,
    )


def join(deltas: Iterable[Delta]) -> Completion:
    """Combines all deltas of a stream into a completion. Raises Internal if the stream ended before a sample did."""
    everything = tuple(deltas)
    parts: dict[int, list[Delta]] = {}
    for delta in everything:
        parts.setdefault(delta.index, []).append(delta)
    if not parts or sorted(parts) != list(range(len(parts))):
        raise Internal("the stream ended without a delta of every sample")
    return Completion(
        samples=tuple(_sample(parts[index]) for index in range(len(parts))),
        usage=next((p.usage for p in everything if p.usage is not None), Usage(0, 0, 0, 0, 0, 0)),
        timings=next((p.timings for p in everything if p.timings is not None), Timings()),
        prompt_logprobs=tuple(item for delta in everything for item in delta.prompt_logprobs),
        request_id=everything[-1].request_id,
    )


def _sample(parts: list[Delta]) -> Sample:
    """Joins all deltas of one sample, in order. Raises Internal if the last delta has no finish reason."""
    last = parts[-1]
    if last.finish_reason is None:
        raise Internal(f"the stream ended without a finish reason of sample {last.index}")
    return Sample(
        text="".join(part.text for part in parts),
        token_ids=tuple(token for part in parts for token in part.token_ids),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        logprobs=tuple(item for part in parts for item in part.logprobs),
        beam_score=last.beam_score,
    )


def model_from_pb(message: pb.Model) -> ModelInfo:
    sizes, eos_token_ids = (message.max_model_len, message.vocab_size), tuple(message.eos_token_ids)
    return ModelInfo(message.id, *sizes, eos_token_ids, message.pooling, message.parent or None)


def embedding_from_pb(message: pb.EmbedResponse) -> Embedding:
    usage, timings = usage_from_pb(message.usage), timings_from_pb(message.timings)
    return Embedding(tuple(message.embedding), usage, timings, message.request_id)
