"""Assembles one HTTP answer, whole or in chunks: choices, echoes, log-probabilities. No I/O.

Each prompt has one choice per sample (`n`) or per returned beam.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from gateway.api.openai_reply import Choice, ChunkWriter, Envelope, LogprobFormat, finish_name, stop_reason
from gateway.api.openai_request import ChatBody, CompletionBody
from gateway.intake.assets import ModelAssets
from gateway.intake.validate import ResolvedRequest
from gateway.request.delta import Delta, Summary
from gateway.request.detokenize import TokenTexts
from protos.v1 import types_pb2 as pb


class Answer:
    """The answer to one completion or chat body."""

    def __init__(
        self, assets: ModelAssets, body: CompletionBody | ChatBody, envelope: Envelope, texts: TokenTexts
    ) -> None:
        self._tokenizer = assets.tokenizer
        self._eos = frozenset(assets.eos_token_ids)
        self._format = LogprobFormat(texts)
        self._chat = isinstance(body, ChatBody)
        self._echo = isinstance(body, CompletionBody) and bool(body.echo)
        self._scores_only = isinstance(body, CompletionBody) and body.scores_only
        self._with_logprobs = body.logprobs is not None and body.logprobs is not False
        self._summaries: list[Summary] = []
        self.body = body
        self.envelope = envelope
        self.requests: list[ResolvedRequest] = []
        self.choices: list[Choice] = []
        self._samples = 1

    def take(self, requests: list[ResolvedRequest]) -> None:
        """Creates one choice per sample of each request. All requests have the same number of samples."""
        self.requests = requests
        self._samples = requests[0].sampling.num_sequences
        self.choices = [
            Choice(index, requests[index // self._samples]) for index in range(self._samples * len(requests))
        ]

    def _choice_of(self, number: int, delta: Delta) -> Choice:
        """Returns the choice of a delta of request `number`. The request's first delta contains the data that all its
        choices show.
        """
        first = number * self._samples
        if delta.prompt_logprobs:
            for choice in self.choices[first : first + self._samples]:
                choice.prompt_logprobs = delta.prompt_logprobs
        return self.choices[first + delta.index]

    # --- whole

    def add(self, number: int, deltas: Sequence[Delta]) -> None:
        """Adds deltas of request `number` to the whole answer."""
        for delta in deltas:
            self._choice_of(number, delta).add(delta)

    def whole(self) -> bytes:
        summaries = [
            self._summary(c.last.summary) for c in self.choices if c.last is not None and c.last.summary is not None
        ]
        return self.envelope.whole([self._choice(choice) for choice in self.choices], summaries)

    def _choice(self, choice: Choice) -> dict[str, Any]:
        last = choice.last or Delta()
        answer: dict[str, Any] = {"index": choice.index}
        text = "" if self._scores_only else "".join(choice.text)
        if self._chat:
            answer["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            answer["text"] = self._prompt_text(choice) + text
        answer["logprobs"] = self._logprobs(choice)
        answer.update(self._ending(last))
        if self.body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = self._format.prompt(choice.prompt_logprobs)
        return answer

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        if self._chat:
            return self._format.chat(choice.logprobs)
        head = self._format.echoed(choice.request, choice.prompt_logprobs) if self._echo else None
        if self._scores_only:
            return head
        tail, _ = self._format.completion(choice.logprobs, len(self._prompt_text(choice)))
        return tail if head is None else {name: [*head[name], *tail[name]] for name in tail}

    # --- in chunks

    def chunks(self, writer: ChunkWriter, number: int, deltas: Sequence[Delta]) -> bytes:
        """Returns the chunks for deltas of request `number`. The stream's last delta adds usage and account."""
        first, events = number * self._samples, b""
        for delta in deltas:
            if not delta.is_plain:
                events += b"".join(self._chunks(writer, self._choice_of(number, delta), delta))
            elif delta.text:
                events += writer.text(first + delta.index, delta.text)
        return events

    def _chunks(self, writer: ChunkWriter, choice: Choice, delta: Delta) -> Iterator[bytes]:
        if delta.is_first:
            yield from self._opening(writer, choice, delta)
        choice.logprobs += delta.logprobs
        if not self._scores_only and (delta.text or (choice.logprobs and self._with_logprobs)):
            yield writer.text(choice.index, delta.text, self._chunk_logprobs(choice))
        if delta.finish_reason is None:
            return
        self._summaries += [] if delta.summary is None else [self._summary(delta.summary)]
        done = delta.summary is not None and len(self._summaries) == len(self.requests)
        account = self._summaries if done and not self.body.include_usage else None
        yield writer.finish(choice.index, self._ending(delta), account)
        if done and self.body.include_usage:
            yield writer.usage(self._summaries)

    def _opening(self, writer: ChunkWriter, choice: Choice, delta: Delta) -> Iterator[bytes]:
        if self._chat:
            yield writer.role(choice.index)
        elif self._echo:
            text = self._prompt_text(choice)
            choice.offset = len(text)
            logprobs = self._format.echoed(choice.request, choice.prompt_logprobs) if self._with_logprobs else None
            yield writer.text(choice.index, text, logprobs)

    def _chunk_logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        items: list[pb.TokenLogprob] = choice.logprobs
        choice.logprobs = []
        if self._chat:
            return self._format.chat(items)
        found, choice.offset = self._format.completion(items, choice.offset)
        return found

    # --- common

    def _ending(self, last: Delta) -> dict[str, Any]:
        """Returns the end of a choice as its last delta describes it."""
        if self._scores_only:
            return {"finish_reason": "length", "stop_reason": None}
        ending: dict[str, Any] = {
            "finish_reason": finish_name(last.finish_reason),
            "stop_reason": stop_reason(last, self._eos),
        }
        if last.beam_score is not None:
            ending["beam_score"] = last.beam_score
        return ending

    def _prompt_text(self, choice: Choice) -> str:
        if not self._echo:
            return ""
        if choice.request.prompt_text is not None:
            return choice.request.prompt_text
        return str(self._tokenizer.decode(choice.request.prompt_ids, skip_special_tokens=True))

    def _summary(self, summary: Summary) -> Summary:
        """Returns the summary. If the request wants no tokens, the token that a worker always draws does not count."""
        if not self._scores_only:
            return summary
        return replace(summary, completion_tokens=0)
