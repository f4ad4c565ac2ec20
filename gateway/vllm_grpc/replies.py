"""Converts deltas into vLLM's GenerateResponse messages: chunks of new tokens, and one `complete` for each sample."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as pb

from gateway.intake.resolved_request import ResolvedRequest
from gateway.request.delta import Delta
from protos.v1 import prefill_pb2
from protos.v1 import types_pb2 as types_pb

Write = Callable[[pb.GenerateResponse], Coroutine[Any, Any, None]]


class Replies:
    """The writer of one request's deltas.

    With `stream`, every delta is a chunk, and the tokens of a sample's last delta are also in its `complete`, as in
    vLLM. Otherwise each sample has one `complete` with all its tokens.
    """

    def __init__(self, request: ResolvedRequest, write: Write, *, stream: bool) -> None:
        self._request = request
        self._write = write
        self._stream = stream
        self._turn = asyncio.Lock()
        """A lock for writes. A stream takes one write at a time, and an aborted request may still have a write in
        progress.
        """
        self._open = {index: Delta(index) for index in range(request.sampling.num_sequences)}
        """The pending content of `complete`, for each sample that has not ended."""
        self._num_tokens = dict.fromkeys(self._open, 0)

    async def write(self, deltas: list[Delta]) -> None:
        """Writes the deltas of one message of an `Outlet`."""
        async with self._turn:
            for delta in deltas:
                await self._add(delta)

    async def abort(self) -> None:
        """Ends every sample that has not ended, because the request was aborted."""
        async with self._turn:
            for index, whole in sorted(self._open.items()):
                await self._end(Delta(index) if self._stream else whole, "abort")

    async def _add(self, delta: Delta) -> None:
        self._num_tokens[delta.index] += len(delta.token_ids)
        if self._stream:
            await self._write(pb.GenerateResponse(chunk=self._chunk(delta)))
            self._open[delta.index] = delta
        else:
            _append(self._open[delta.index], delta)
        if delta.finish_reason is not None:
            await self._end(self._open.pop(delta.index), delta.finish_reason.value)

    async def _end(self, delta: Delta, reason: str) -> None:
        complete = pb.GenerateComplete(
            output_ids=delta.token_ids,
            finish_reason=reason,
            prompt_tokens=len(self._request.prompt_ids),
            completion_tokens=self._num_tokens[delta.index],
            cached_tokens=delta.summary.sources.cached if delta.summary else 0,
            output_logprobs=self._output_logprobs(delta.logprobs),
            input_logprobs=self._input_logprobs(delta.prompt_logprobs),
            index=delta.index,
        )
        if delta.stop_string is not None:
            complete.matched_stop_str = delta.stop_string
        elif delta.stop_token_id is not None:
            complete.matched_token_id = delta.stop_token_id
        await self._write(pb.GenerateResponse(complete=complete))

    def _chunk(self, delta: Delta) -> pb.GenerateStreamChunk:
        return pb.GenerateStreamChunk(
            token_ids=delta.token_ids,
            prompt_tokens=len(self._request.prompt_ids),
            completion_tokens=len(delta.token_ids),
            output_logprobs=self._output_logprobs(delta.logprobs),
            input_logprobs=self._input_logprobs(delta.prompt_logprobs),
            index=delta.index,
        )

    def _output_logprobs(self, given: Sequence[types_pb.TokenLogprob]) -> pb.OutputLogProbs | None:
        if not given:
            return None
        return pb.OutputLogProbs(
            token_logprobs=[token.logprob for token in given],
            token_ids=[token.token_id for token in given],
            top_logprobs=[_top(token) for token in given] if self._request.sampling.logprobs else [],
        )

    def _input_logprobs(self, given: Sequence[types_pb.TokenLogprob]) -> pb.InputLogProbs | None:
        """Returns the log-probabilities of the prompt. The first token has no log-probability."""
        if not given:
            return None
        tops = [_top(token) for token in given] if self._request.sampling.prompt_logprobs else []
        return pb.InputLogProbs(
            token_logprobs=[pb.InputTokenLogProb(), *(pb.InputTokenLogProb(value=token.logprob) for token in given)],
            token_ids=self._request.prompt_ids,
            top_logprobs=[pb.TopLogProbs(), *tops] if tops else [],
        )


def prefill_replies(
    request: ResolvedRequest, done: prefill_pb2.PrefillDone, kv_transfer_params_json: str
) -> list[pb.GenerateResponse]:
    """Returns prefill's answer to the router: for each sample, the first token and the name of the prefill."""
    return [
        pb.GenerateResponse(
            complete=pb.GenerateComplete(
                output_ids=[token.token_id],
                finish_reason="length",
                prompt_tokens=len(request.prompt_ids),
                completion_tokens=1,
                cached_tokens=done.sources.cached_tokens,
                index=token.sample_index,
                kv_transfer_params_json=kv_transfer_params_json,
            )
        )
        for token in done.tokens
    ]


def _append(whole: Delta, delta: Delta) -> None:
    whole.token_ids += delta.token_ids
    whole.logprobs += delta.logprobs
    whole.prompt_logprobs = whole.prompt_logprobs or delta.prompt_logprobs
    whole.stop_string, whole.stop_token_id = delta.stop_string, delta.stop_token_id
    whole.summary = delta.summary


def _top(token: types_pb.TokenLogprob) -> pb.TopLogProbs:
    return pb.TopLogProbs(values=token.top_logprobs, token_ids=token.top_token_ids)
