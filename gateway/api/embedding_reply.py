"""Builds answers to POST /v1/embeddings and POST /score, which are not streamed. This module does no I/O."""

from __future__ import annotations

import base64
import math
import secrets
import sys
import time
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from common.errors import InvalidArgument
from gateway.api.embedding_request import EmbeddingBody, ScoreBody
from gateway.api.openai_reply import account_of, dumps
from gateway.intake.resolved_request import ResolvedRequest
from gateway.intake.wanted import Wanted
from gateway.request.delta import Delta, Summary


def shortened(vector: Sequence[float], dimensions: int | None) -> Sequence[float]:
    """Returns the first `dimensions` values of a vector, scaled to length 1 again, as in OpenAI's API, or the vector
    itself if `dimensions` is None or the number of its values. Raises InvalidArgument if `dimensions` is less than 1 or
    more than the number of values.
    """
    if dimensions is None or dimensions == len(vector):
        return vector
    if not 1 <= dimensions <= len(vector):
        what = f"must be at least 1 and at most {len(vector)}, the dimensions of the model, got {dimensions}"
        raise InvalidArgument.of("dimensions", what)
    kept = vector[:dimensions]
    length = math.hypot(*kept) or 1.0
    return [value / length for value in kept]


class PooledAnswer:
    """The base class of embedding and score answers. It collects the embeddings."""

    field_names: Mapping[str, str] = {"prompt": "input"}

    def __init__(self, body: EmbeddingBody | ScoreBody, model: str) -> None:
        self.requests: list[ResolvedRequest] = []
        self._asked = body
        self._model = model
        self._deltas: dict[int, Delta] = {}

    def all_wanted(self) -> list[Wanted]:
        return self._asked.all_wanted()

    def take(self, requests: list[ResolvedRequest]) -> None:
        self.requests = requests

    def add(self, number: int, deltas: Sequence[Delta]) -> None:
        self._deltas[number] = deltas[-1]

    def _vectors(self) -> list[Sequence[float]]:
        return [self._deltas[number].embedding for number in range(len(self.requests))]

    def _listed(self, prefix: str, data: list[dict[str, Any]]) -> bytes:
        summaries = [summary for delta in self._deltas.values() if (summary := delta.summary) is not None]
        return dumps(
            {
                "id": prefix + secrets.token_hex(12),
                "object": "list",
                "created": int(time.time()),
                "model": self._model,
                "data": data,
                "usage": _usage(summaries),
                "looseleaf": account_of(summaries),
            }
        )


class EmbeddingAnswer(PooledAnswer):
    """The answer to one body of /v1/embeddings."""

    def __init__(self, body: EmbeddingBody, model: str) -> None:
        super().__init__(body, model)
        self._body = body

    def whole(self) -> list[bytes]:
        """Returns the answer as JSON. Raises InvalidArgument if the body requests more dimensions than the model
        has.
        """
        vectors = [shortened(vector, self._body.dimensions) for vector in self._vectors()]
        encode = _base64 if self._body.encoding_format == "base64" else list
        data = [
            {"object": "embedding", "index": index, "embedding": encode(vector)} for index, vector in enumerate(vectors)
        ]
        return [self._listed("embd-", data)]


class ScoreAnswer(PooledAnswer):
    """The answer to one body of /score: the cosine similarity of two embeddings for each pair of texts."""

    field_names: Mapping[str, str] = {"prompt": "text_2"}

    def __init__(self, body: ScoreBody, model: str) -> None:
        super().__init__(body, model)
        self._num_first, self._num_second = body.num_texts

    def whole(self) -> list[bytes]:
        vectors = self._vectors()
        first, second = vectors[: self._num_first], vectors[self._num_first :]
        pairs = zip(first * (self._num_second // self._num_first), second, strict=True)
        data = [{"object": "score", "index": index, "score": _cosine(*pair)} for index, pair in enumerate(pairs)]
        return [self._listed("score-", data)]


def _cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """Returns the cosine similarity of two vectors of length 1."""
    return math.fsum(a * b for a, b in zip(first, second, strict=True))


def _base64(vector: Sequence[float]) -> str:
    """Returns fp32 values in base64, little-endian, as in OpenAI's API."""
    values = array("f", vector)
    if sys.byteorder == "big":
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode()


def _usage(summaries: Sequence[Summary]) -> dict[str, Any]:
    prompt = sum(summary.prompt_tokens for summary in summaries)
    cached = sum(summary.sources.cached for summary in summaries)
    return {"prompt_tokens": prompt, "total_tokens": prompt, "prompt_tokens_details": {"cached_tokens": cached}}
