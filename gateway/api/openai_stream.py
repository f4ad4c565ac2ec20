"""Assembles the answer to a completion or a chat, complete or in chunks. This module does no I/O.

Each prompt has one choice per sample (`n`) or per returned beam.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from common.errors import LooseleafError
from common.types import FinishReason
from gateway.api.chat_fields import tool_choice
from gateway.api.chat_plan import ChatPlan, ChatPlanner
from gateway.api.chat_reply import deltas_of, message_of
from gateway.api.openai_reply import (
    DONE,
    Choice,
    ChunkWriter,
    Envelope,
    LogprobFormat,
    dumps,
    error_body,
    finish_name,
    stop_reason,
)
from gateway.api.openai_request import ChatBody, CompletionBody
from gateway.intake.assets import ModelAssets
from gateway.intake.limits import check_prompt_logprobs
from gateway.intake.resolved_request import ResolvedRequest
from gateway.intake.wanted import Wanted
from gateway.request.delta import Delta, Summary
from gateway.request.detokenize import TokenTexts
from gateway.tools.formats import CallIds
from gateway.tools.output_reader import OutputReader
from protos.v1 import types_pb2 as pb


class Answer:
    """The answer to one completion or chat body."""

    ending = DONE

    def __init__(
        self,
        assets: ModelAssets,
        body: CompletionBody | ChatBody,
        envelope: Envelope,
        texts: TokenTexts,
        planner: ChatPlanner | None = None,
    ) -> None:
        """`planner` is None for completions."""
        self._tokenizer = assets.tokenizer
        self._eos = frozenset(assets.eos_token_ids)
        self._format = LogprobFormat(texts)
        self._chat = isinstance(body, ChatBody)
        self.field_names: Mapping[str, str] = body.field_names
        self._echo = isinstance(body, CompletionBody) and bool(body.echo)
        self._scores_only = isinstance(body, CompletionBody) and body.scores_only
        self._with_logprobs = body.logprobs is not None and body.logprobs is not False
        self._with_ids = bool(body.return_token_ids)
        self._continuous = body.continuous_usage
        self._summaries: list[Summary] = []
        self._num_tokens = 0
        """Number of tokens of all choices so far."""
        self.asking = self.body = body
        self.envelope = envelope
        self._writer = ChunkWriter(envelope, include_usage=body.include_usage)
        self.requests: list[ResolvedRequest] = []
        self.choices: list[Choice] = []
        self._echoes: dict[int, dict[str, Any]] = {}
        self._samples = 1
        self._planner = planner
        self._plan: ChatPlan | None = None
        """The chat's plan, or None if all text is content."""
        self._ids = CallIds(str)

    def all_wanted(self) -> list[Wanted]:
        """Returns one request per prompt. Raises InvalidArgument if a field is invalid."""
        wanted = self.body.all_wanted()
        if self._planner is not None and isinstance(self.body, ChatBody):
            plan = self._planner.plan(wanted[0], tool_choice(self.body))
            self._ids, self._plan = plan.call_ids(), plan if plan.reads else None
        return wanted

    def take(self, requests: list[ResolvedRequest]) -> None:
        """Creates one choice per sample of each request. All requests have the same number of samples. Raises
        InvalidArgument if the answer would repeat too many log-probabilities of prompts.
        """
        self.requests = requests
        self._samples = requests[0].sampling.num_sequences
        tokens = sum(len(request.prompt_ids) for request in requests)
        check_prompt_logprobs("prompt_logprobs", self.body.prompt_logprobs, self._samples, tokens)
        if self._echo and self._with_logprobs:
            check_prompt_logprobs("logprobs", self.body.logprobs, self._samples, tokens)
        self.choices = [
            Choice(index, requests[index // self._samples]) for index in range(self._samples * len(requests))
        ]
        if self._plan is not None:
            for choice in self.choices:
                choice.reader = self._plan.reader(choice.request.prompt_text or "")

    def _choice_of(self, number: int, delta: Delta) -> Choice:
        """Returns the choice to which a delta of request `number` belongs. If the delta has the prompt's
        log-probabilities, stores them in all choices of the request.
        """
        first = number * self._samples
        if delta.prompt_logprobs:
            for choice in self.choices[first : first + self._samples]:
                choice.prompt_logprobs = delta.prompt_logprobs
        return self.choices[first + delta.index]

    # --- whole

    def add(self, number: int, deltas: Sequence[Delta]) -> None:
        """Adds deltas of request `number` to the complete answer."""
        for delta in deltas:
            self._choice_of(number, delta).add(delta)

    def whole(self) -> Iterator[bytes]:
        summaries = [
            self._summary(c.last.summary) for c in self.choices if c.last is not None and c.last.summary is not None
        ]
        more = {"prompt_token_ids": self.requests[0].prompt_ids} if self._with_ids and self._chat else {}
        return self.envelope.whole([self._choice(choice) for choice in self.choices], summaries, **more)

    def _choice(self, choice: Choice) -> Iterator[bytes]:
        """Yields pieces of a choice's JSON."""
        last = choice.last or Delta()
        answer: dict[str, Any] = {"index": choice.index}
        text = "" if self._scores_only else "".join(choice.text)
        if self._chat:
            answer["message"] = message_of(text, choice.reader, self._ids)
        else:
            answer["text"] = self._prompt_text(choice) + text
        answer["logprobs"] = self._logprobs(choice)
        answer.update(self._ending(last, choice))
        if self._with_ids:
            ids: list[int] = [] if self._scores_only else choice.token_ids
            answer |= {"token_ids": ids, "prompt_token_ids": choice.request.prompt_ids}
        if self.body.prompt_logprobs is None:
            yield dumps(answer)
            return
        yield dumps(answer)[:-1] + b',"prompt_logprobs":'
        number = choice.index // self._samples
        yield from self._format.prompt(number, choice.prompt_logprobs, self.body.prompt_logprobs)
        yield b"}"

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        if self._chat:
            return self._format.chat(choice.logprobs)
        head = self._echoed(choice) if self._echo else None
        if self._scores_only:
            return head
        tail, _ = self._format.completion(choice.logprobs, len(self._prompt_text(choice)))
        return tail if head is None else {name: [*head[name], *tail[name]] for name in tail}

    # --- in chunks

    def events(self, number: int, deltas: Sequence[Delta]) -> bytes:
        return self.chunks(self._writer, number, deltas)

    def error_object(self, error: LooseleafError) -> dict[str, Any]:
        return error_body(error)

    def failure(self, error: LooseleafError) -> bytes:
        return b"data: " + dumps(error_body(error)) + b"\n\n" + DONE

    def chunks(self, writer: ChunkWriter, number: int, deltas: Sequence[Delta]) -> bytes:
        """Returns the chunks for deltas of request `number`. The chunks of the stream's last delta include the
        `looseleaf` object and, if the body requests it, the usage.
        """
        first, events = number * self._samples, b""
        for delta in deltas:
            if self._continuous:
                self._count(writer, delta)
            if not delta.is_plain or self._with_ids or self._plan is not None:
                events += b"".join(self._chunks(writer, self._choice_of(number, delta), delta))
            elif delta.text:
                events += writer.text(first + delta.index, delta.text)
        return events

    def _chunks(self, writer: ChunkWriter, choice: Choice, delta: Delta) -> Iterator[bytes]:
        if delta.is_first:
            yield from self._opening(writer, choice, delta)
        choice.logprobs += delta.logprobs
        if choice.reader is not None:
            yield from self._read(writer, choice, choice.reader, delta)
        else:
            yield from self._text(writer, choice, delta)
        if delta.finish_reason is None:
            return
        self._summaries += [] if delta.summary is None else [self._summary(delta.summary)]
        done = delta.summary is not None and len(self._summaries) == len(self.requests)
        account = self._summaries if done and not self.body.include_usage else None
        yield writer.finish(choice.index, self._ending(delta, choice), account)
        if done and self.body.include_usage:
            yield writer.usage(self._summaries)

    def _text(self, writer: ChunkWriter, choice: Choice, delta: Delta) -> Iterator[bytes]:
        """Yields a chunk with a delta's text, token ids and log-probabilities, unless there are none."""
        if self._scores_only:
            return
        ids = f',"token_ids":{json.dumps(delta.token_ids)}' if self._with_ids else ""
        if delta.text or ids or (choice.logprobs and self._with_logprobs):
            yield writer.text(choice.index, delta.text, self._chunk_logprobs(choice), ids)

    def _read(self, writer: ChunkWriter, choice: Choice, reader: OutputReader, delta: Delta) -> Iterator[bytes]:
        """Yields chunks for the pieces of a delta's text. The first chunk has the log-probabilities and token ids."""
        pieces = reader.feed(delta.text) + ([] if delta.finish_reason is None else reader.finish())
        fields = list(deltas_of(pieces, self._ids))
        ids = f',"token_ids":{json.dumps(delta.token_ids)}' if self._with_ids else ""
        if not fields and ((choice.logprobs and self._with_logprobs) or ids):
            fields = [{"content": ""}]
        for part in fields:
            yield writer.delta(choice.index, part, self._chunk_logprobs(choice) if choice.logprobs else None, ids)
            ids = ""

    def _count(self, writer: ChunkWriter, delta: Delta) -> None:
        self._num_tokens += 0 if self._scores_only else len(delta.token_ids)
        writer.count(sum(len(request.prompt_ids) for request in self.requests), self._num_tokens)

    def _opening(self, writer: ChunkWriter, choice: Choice, delta: Delta) -> Iterator[bytes]:
        ids = f',"prompt_token_ids":{json.dumps(choice.request.prompt_ids)}' if self._with_ids else ""
        if self._chat:
            yield writer.role(choice.index, ids)
        elif self._echo:
            text = self._prompt_text(choice)
            choice.offset = len(text)
            logprobs = self._echoed(choice) if self._with_logprobs else None
            yield writer.text(choice.index, text, logprobs, ids)
        elif ids:
            yield writer.text(choice.index, "", None, ids)

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

    def _ending(self, last: Delta, choice: Choice) -> dict[str, Any]:
        """Returns the fields that describe how a choice ended. `last` is the choice's last delta."""
        if self._scores_only:
            return {"finish_reason": "length", "stop_reason": None}
        ending: dict[str, Any] = {
            "finish_reason": "tool_calls" if _ended_with_calls(last, choice) else finish_name(last.finish_reason),
            "stop_reason": stop_reason(last, self._eos),
        }
        if last.beam_score is not None:
            ending["beam_score"] = last.beam_score
        return ending

    def _echoed(self, choice: Choice) -> dict[str, Any]:
        """Returns the log-probabilities of the prompt, which all choices of a request share."""
        number = choice.index // self._samples
        if (found := self._echoes.get(number)) is None:
            most = self.body.logprobs or 0
            found = self._echoes[number] = self._format.echoed(choice.request, choice.prompt_logprobs, most)
        return found

    def _prompt_text(self, choice: Choice) -> str:
        if not self._echo:
            return ""
        if choice.request.prompt_text is not None:
            return choice.request.prompt_text
        return str(self._tokenizer.decode(choice.request.prompt_ids, skip_special_tokens=True))

    def _summary(self, summary: Summary) -> Summary:
        """Returns the summary. If the answer consists only of the prompt and its log-probabilities, the token that a
        worker always samples does not count.
        """
        if not self._scores_only:
            return summary
        return replace(summary, completion_tokens=0)


def _ended_with_calls(last: Delta, choice: Choice) -> bool:
    """Returns whether the model called tools and then ended its answer itself."""
    return last.finish_reason is FinishReason.STOP and choice.reader is not None and choice.reader.has_calls
