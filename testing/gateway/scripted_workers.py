"""Workers of both roles that follow a `Script` (`testing.gateway.parts`), on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from common.access import Door
from common.errors import LooseleafError, Unavailable
from common.group_need import blocks_of
from common.rpc import Protection, RpcServer
from common.types import Role, WorkerRecord
from protos.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from protos.v1 import types_pb2 as pb
from testing.gateway.parts import BLOCK_SIZE, Fault, Script, beam_score, expected_embedding, expected_ids, make_record

HEARTBEAT_S = 0.05
CLAIMED = decode_pb2.GroupAccount(claim_ns=1_000)
"""The account of a group that is rejected."""


class _Prefill(prefill_pb2_grpc.PrefillServiceServicer):
    def __init__(self, script: Script) -> None:
        self._script = script

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        self._script.prefilled.append(request)
        yield prefill_pb2.PrefillResponse(queued=prefill_pb2.PrefillQueued(load=pb.WorkerLoad(num_waiting=1)))
        step = self._script.prefills.pop(0) if self._script.prefills else 0.0
        if isinstance(step, LooseleafError):
            raise step
        try:
            for _ in range(round(step / HEARTBEAT_S)):
                await asyncio.sleep(HEARTBEAT_S)
                if self._script.prefill_heartbeats:
                    yield prefill_pb2.PrefillResponse(progress=prefill_pb2.PrefillProgress())
            await asyncio.sleep(step % HEARTBEAT_S)
        except (asyncio.CancelledError, GeneratorExit):  # while it computes, or while a heartbeat is being sent
            self._script.prefills_cancelled += 1
            raise
        yield prefill_pb2.PrefillResponse(done=self._done(request))

    def _done(self, request: prefill_pb2.PrefillRequest) -> prefill_pb2.PrefillDone:
        if request.pooling:
            return self._pooled(request)
        beams, prompt = request.sampling.HasField("beam_width"), request.prompt_token_ids
        cached = self._script.cached_tokens
        tokens = [] if beams else [_first_token(request, branch, self._script) for branch in request.branches]
        going = [b for b, t in zip(request.branches, tokens, strict=True) if not t.finish_reason] if tokens else []
        tables = [
            _tables(len(prompt), branch, number)
            for number, branch in enumerate(request.branches[:1] if beams else going)
        ]
        return prefill_pb2.PrefillDone(
            ticket=pb.Ticket(arena_id="a", epoch=1, branches=tables) if tables else None,
            tokens=tokens,
            sources=pb.PromptSources(cached_tokens=cached, computed_tokens=len(prompt) - cached),
            timings=pb.Timings(queue_ns=1_000_000, prefill_ns=2_000_000),
            prompt_logprobs=_prompt_logprobs(request),
            load=pb.WorkerLoad(),
            beam_candidates=pb.BeamCandidates(token_ids=[5], logprobs=[-0.5]) if beams else None,
        )

    def _pooled(self, request: prefill_pb2.PrefillRequest) -> prefill_pb2.PrefillDone:
        prompt = request.prompt_token_ids
        return prefill_pb2.PrefillDone(
            embedding=expected_embedding(prompt),
            sources=pb.PromptSources(computed_tokens=len(prompt)),
            timings=pb.Timings(queue_ns=1_000_000, prefill_ns=2_000_000),
            load=pb.WorkerLoad(),
        )


def _first_token(request: prefill_pb2.PrefillRequest, branch: pb.Branch, script: Script) -> prefill_pb2.BranchToken:
    token = script.draw(request.prompt_token_ids, branch.output_token_ids, branch.sample_index)
    return prefill_pb2.BranchToken(
        sample_index=branch.sample_index,
        token_id=token,
        logprob=_logprob(token) if request.sampling.HasField("logprobs") else None,
        finish_reason=_finish(request.stopping, token, len(branch.output_token_ids) + 1),
    )


def _tables(prompt_len: int, branch: pb.Branch, number: int) -> pb.BranchTables:
    """Returns the block tables of a branch, without the blocks themselves. All branches except the first one share the
    prompt's full blocks or, if they have no output, all of the prompt's blocks.
    """
    num_outputs = len(branch.output_token_ids)
    shared = prompt_len // BLOCK_SIZE if num_outputs else blocks_of(prompt_len, BLOCK_SIZE)
    return pb.BranchTables(num_tokens=prompt_len + num_outputs, shared_blocks=shared if number else 0)


def _finish(stopping: pb.StoppingParams, token: int, num_outputs: int) -> pb.FinishReason:
    if token in stopping.stop_token_ids and num_outputs >= stopping.min_tokens:
        return pb.FINISH_REASON_STOP
    return pb.FINISH_REASON_LENGTH if num_outputs >= stopping.max_tokens else pb.FINISH_REASON_UNSPECIFIED


def _prompt_logprobs(request: prefill_pb2.PrefillRequest) -> list[pb.TokenLogprob]:
    if not request.sampling.HasField("prompt_logprobs"):
        return []
    return [_logprob(token, max(1, request.sampling.prompt_logprobs)) for token in request.prompt_token_ids[1:]]


def _logprob(token: int, num_tops: int = 1) -> pb.TokenLogprob:
    tops = [(token + rank, -0.5 * (rank + 1)) for rank in range(num_tops)]
    ids, values = zip(*tops, strict=True)
    return pb.TokenLogprob(token_id=token, logprob=-0.5, rank=1, top_token_ids=ids, top_logprobs=values)


class _Decode(decode_pb2_grpc.DecodeServiceServicer):
    def __init__(self, script: Script) -> None:
        self._script = script

    async def Session(
        self, requests: AsyncIterator[decode_pb2.SessionRequest], context: Any
    ) -> AsyncIterator[decode_pb2.SessionResponse]:
        steps: asyncio.Queue[list[decode_pb2.SequenceOutput] | None] = asyncio.Queue()
        running: dict[int, _Group] = {}
        frozen = asyncio.Event()

        async def read() -> None:
            async for request in requests:
                if request.HasField("submit"):
                    self._script.submitted.append(request.submit)
                    fault = self._script.submits.pop(0) if self._script.submits else Fault("none")
                    group = running[request.submit.handle] = _Group(request.submit, self._script)
                    group.task = asyncio.create_task(group.generate(fault, steps.put_nowait, frozen))
                else:
                    self._cancel(request.cancel, running[request.cancel.handle])

        async def beat() -> None:
            while not frozen.is_set():
                await asyncio.sleep(HEARTBEAT_S)
                steps.put_nowait([])

        reader, heart = asyncio.create_task(read()), asyncio.create_task(beat())
        try:
            while (outputs := await steps.get()) is not None:
                if not outputs:
                    yield decode_pb2.SessionResponse()
                    continue
                response = decode_pb2.SessionResponse(load=self._script.load)
                _add(response, outputs)
                response.load.num_running = sum(len(group.live) for group in running.values())
                more: list[decode_pb2.SequenceOutput] | None = []
                while self._script.burst and more is not None and not steps.empty():
                    more = steps.get_nowait()
                    _add(response, more or [])
                yield response
                if more is None:
                    break
            raise Unavailable("the worker died")
        finally:
            for task in (reader, heart, *(group.task for group in running.values() if group.task)):
                task.cancel()

    def _cancel(self, cancel: decode_pb2.Cancel, group: _Group) -> None:
        if cancel.HasField("sample_index"):
            self._script.cancelled_samples.append((cancel.handle, cancel.sample_index))
            group.live.pop(cancel.sample_index, None)
        else:
            self._script.cancelled.append(cancel.handle)
            group.live.clear()
            assert group.task is not None
            group.task.cancel()


def _add(response: decode_pb2.SessionResponse, outputs: list[decode_pb2.SequenceOutput]) -> None:
    """Adds outputs to a response. As in a decode worker, an output with one token and nothing else is a plain token."""
    plain = response.plain_tokens
    for output in outputs:
        if len(output.token_ids) != 1 or output.logprobs or output.finish_reason or output.rejection:
            response.outputs.append(output)
        else:
            plain.handles.append(output.handle)
            plain.attempts.append(output.attempt)
            plain.sample_indices.append(output.sample_index)
            plain.output_indices.append(output.first_index)
            plain.token_ids.append(output.token_ids[0])


class _Group:
    """A submitted group. Each step adds a token to every live sample. A beam search gets all its tokens at its end."""

    def __init__(self, submit: decode_pb2.Submit, script: Script) -> None:
        self._submit = submit
        self._script = script
        self._beams = submit.sampling.num_sequences if submit.sampling.HasField("beam_width") else 0
        self.live = {b.sample_index: list(b.output_token_ids) for b in submit.branches}
        """The output tokens of each sample."""
        self.task: asyncio.Task[None] | None = None

    async def generate(
        self, fault: Fault, put: Callable[[list[decode_pb2.SequenceOutput] | None], None], frozen: asyncio.Event
    ) -> None:
        step = 0
        while self.live:
            if not self._script.burst:
                await asyncio.sleep(self._script.step_s)
            if step == fault.after and fault.action in ("reject", "die", "silence", "freeze"):
                if fault.action == "freeze":
                    frozen.set()
                elif fault.action != "silence":
                    put(
                        [self._output(0, rejection=fault.rejection, account=CLAIMED)]
                        if fault.action == "reject"
                        else None
                    )
                return
            outputs = self._beams_step(step) if self._beams else [self._next(sample) for sample in list(self.live)]
            if step == fault.after and fault.action == "stray":
                stray = self._output(0, first_index=outputs[0].first_index, token_ids=[9])
                stray.attempt += 7
                put([stray])
            if step != fault.after or fault.action != "gap":
                put(outputs)
            if step == fault.after and fault.action == "repeat":
                put(outputs)
            step += 1

    def _next(self, sample: int) -> decode_pb2.SequenceOutput:
        outputs = self.live[sample]
        token = self._script.draw(self._submit.prompt_token_ids, outputs, sample)
        outputs.append(token)
        finish = _finish(self._submit.stopping, token, len(outputs))
        if finish:
            del self.live[sample]
        return self._output(sample, first_index=len(outputs) - 1, token_ids=[token], finish_reason=finish)

    def _beams_step(self, step: int) -> list[decode_pb2.SequenceOutput]:
        length = self._submit.stopping.max_tokens
        if step + 1 < length:
            return []
        self.live.clear()
        return [
            self._output(
                rank,
                token_ids=expected_ids(self._submit.prompt_token_ids, length, rank),
                finish_reason=pb.FINISH_REASON_LENGTH,
                beam_score=beam_score(rank),
            )
            for rank in range(self._beams)
        ]

    def _output(self, sample: int, **fields: Any) -> decode_pb2.SequenceOutput:
        output = decode_pb2.SequenceOutput(
            handle=self._submit.handle, attempt=self._submit.attempt, sample_index=sample, **fields
        )
        if self._submit.sampling.HasField("logprobs"):
            output.logprobs.extend(map(_logprob, output.token_ids))
        if output.finish_reason:
            output.timings.CopyFrom(self._script.timings)
        return output


class ScriptedWorker:
    """A worker of either role on a free port."""

    def __init__(self, role: Role, name: str, script: Script, secret: str | None = None, **record: Any) -> None:
        """Creates the worker, which `start` starts. `secret` is the secret that gateways must send, or None."""
        self.role: Role = role
        self.name = name
        door = None if secret is None else Door(secret)
        self.server = RpcServer("127.0.0.1", 0, protection=Protection(door))
        if role == "prefill":
            add: Any = prefill_pb2_grpc.add_PrefillServiceServicer_to_server
            self.server.add(add, _Prefill(script), "looseleaf.v1.PrefillService")
        else:
            add = decode_pb2_grpc.add_DecodeServiceServicer_to_server
            self.server.add(add, _Decode(script), "looseleaf.v1.DecodeService")
        self._record = record

    async def start(self) -> WorkerRecord:
        await self.server.start()
        address = f"127.0.0.1:{self.server.port}"
        return make_record(self.role, self.name, address=address, **self._record)

    async def stop(self) -> None:
        await self.server.stop(0)
