"""For tests: workers that speak the real protos over real sockets, with tokens by arithmetic and faults by script.

A token is a function of all tokens before it, so whatever happens on the way the right answer is known.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from common.errors import LooseleafError, Unavailable
from common.rpc import RpcServer
from common.types import Role, WorkerRecord
from gateway.assets import ModelAssets
from protos.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from protos.v1 import types_pb2 as pb

VOCAB_SIZE = 400
HEARTBEAT_S = 0.05
HEARTBEAT = decode_pb2.SequenceOutput()
"""Stands for a heartbeat in the queue of outputs."""
BOS_ID, EOS_ID = 1, 2
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer() -> Tokenizer:
    """A byte-level BPE of 400 tokens that puts <s> before a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(
        ["the old mill turned when the wind was strong and stood still when it was not"] * 20, trainer
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS_ID)])
    return tokenizer


def make_assets(**overrides: Any) -> ModelAssets:
    values: dict[str, Any] = {
        "name": "tiny", "tokenizer": make_tokenizer(), "vocab_size": VOCAB_SIZE, "max_position": 512,
        "eos_token_ids": (EOS_ID,), "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    return ModelAssets(**{**values, **overrides})


def next_id(ids: Sequence[int]) -> int:
    """The token after `ids`: never a special one."""
    return 3 + (sum((i + 1) * t for i, t in enumerate(ids[-8:])) * 31 + len(ids) * 7) % (VOCAB_SIZE - 3)


def expected_ids(prompt: Sequence[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_id(ids))
    return ids[len(prompt) :]


@dataclass(slots=True)
class Fault:
    """What goes wrong with one submit: after `after` tokens do `action`."""

    action: str
    """reject, die, gap, repeat, stray, silence (no more tokens), freeze (no heartbeats either)."""
    after: int = 2
    rejection: int = decode_pb2.REJECTION_UNSPECIFIED


@dataclass(slots=True)
class Script:
    """Faults in the order in which calls come, and what was seen."""

    submits: list[Fault] = field(default_factory=list)
    prefills: list[LooseleafError | float] = field(default_factory=list)
    """An error to answer with, or seconds to take."""
    step_s: float = 0.0
    prefill_heartbeats: bool = True
    burst: bool = False
    """All tokens of a submit in one message, as after a gateway was slow."""
    prefilled: list[prefill_pb2.PrefillRequest] = field(default_factory=list)
    submitted: list[decode_pb2.Submit] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    prefills_cancelled: int = 0


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
        except asyncio.CancelledError:
            self._script.prefills_cancelled += 1
            raise
        yield prefill_pb2.PrefillResponse(done=self._done(request))

    def _done(self, request: prefill_pb2.PrefillRequest) -> prefill_pb2.PrefillDone:
        outputs = list(request.branches[0].output_token_ids)
        token = next_id([*request.prompt_token_ids, *outputs])
        ended = len(outputs) + 1 >= request.stopping.max_tokens
        num_tokens = len(request.prompt_token_ids) + len(outputs)
        details = None if not request.sampling.HasField("logprobs") else _logprob(token)
        return prefill_pb2.PrefillDone(
            ticket=None
            if ended
            else pb.Ticket(arena_id="a", epoch=1, branches=[pb.BranchTables(num_tokens=num_tokens)]),
            tokens=[
                prefill_pb2.BranchToken(
                    token_id=token, logprob=details, finish_reason=pb.FINISH_REASON_LENGTH if ended else None
                )
            ],
            sources=pb.PromptSources(computed_tokens=len(request.prompt_token_ids)),
            timings=pb.Timings(queue_ns=1_000_000, prefill_ns=2_000_000),
            prompt_logprobs=[_logprob(t) for t in request.prompt_token_ids[1:]]
            if request.sampling.HasField("prompt_logprobs")
            else [],
            load=pb.WorkerLoad(),
        )


def _logprob(token: int) -> pb.TokenLogprob:
    return pb.TokenLogprob(token_id=token, logprob=-0.5, rank=1, top_token_ids=[token], top_logprobs=[-0.5])


class _Decode(decode_pb2_grpc.DecodeServiceServicer):
    def __init__(self, script: Script) -> None:
        self._script = script

    async def Session(
        self, requests: AsyncIterator[decode_pb2.SessionRequest], context: Any
    ) -> AsyncIterator[decode_pb2.SessionResponse]:
        outputs: asyncio.Queue[decode_pb2.SequenceOutput | None] = asyncio.Queue()
        running: dict[int, asyncio.Task[None]] = {}
        frozen = asyncio.Event()

        async def read() -> None:
            async for request in requests:
                if request.HasField("submit"):
                    self._script.submitted.append(request.submit)
                    fault = self._script.submits.pop(0) if self._script.submits else Fault("none")
                    task = asyncio.create_task(self._generate(request.submit, fault, outputs.put_nowait, frozen))
                    running[request.submit.handle] = task
                else:
                    self._script.cancelled.append(request.cancel.handle)
                    running[request.cancel.handle].cancel()

        async def beat() -> None:
            while not frozen.is_set():
                await asyncio.sleep(HEARTBEAT_S)
                outputs.put_nowait(HEARTBEAT)

        reader, heart = asyncio.create_task(read()), asyncio.create_task(beat())
        try:
            while (output := await outputs.get()) is not None:
                if output is HEARTBEAT:
                    yield decode_pb2.SessionResponse()
                    continue
                response = decode_pb2.SessionResponse(outputs=[output], load=pb.WorkerLoad(num_running=len(running)))
                while self._script.burst and not outputs.empty() and (more := outputs.get_nowait()) is not None:
                    response.outputs.extend([more] if more is not HEARTBEAT else [])
                yield response
            raise Unavailable("the worker died")
        finally:
            for task in (reader, heart, *running.values()):
                task.cancel()

    async def _generate(
        self,
        submit: decode_pb2.Submit,
        fault: Fault,
        put: Callable[[decode_pb2.SequenceOutput | None], None],
        frozen: asyncio.Event,
    ) -> None:
        outputs = list(submit.branches[0].output_token_ids)
        ids = [*submit.prompt_token_ids, *outputs]
        for produced in range(submit.stopping.max_tokens - len(outputs)):
            if not self._script.burst:
                await asyncio.sleep(self._script.step_s)
            index = len(outputs) + produced
            output = decode_pb2.SequenceOutput(handle=submit.handle, attempt=submit.attempt, first_index=index)
            if produced == fault.after and fault.action == "reject":
                output.rejection = fault.rejection  # type: ignore[assignment]
                return put(output)
            if produced == fault.after and fault.action == "die":
                return put(None)
            if produced == fault.after and fault.action in ("silence", "freeze"):
                if fault.action == "freeze":
                    frozen.set()
                return
            ids.append(next_id(ids))
            output.token_ids.append(ids[-1])
            if submit.sampling.HasField("logprobs"):
                output.logprobs.append(_logprob(ids[-1]))
            if index + 1 >= submit.stopping.max_tokens:
                output.finish_reason = pb.FINISH_REASON_LENGTH
                output.timings.CopyFrom(pb.Timings(hand_over_ns=3_000_000, decode_ns=4_000_000))
            if produced == fault.after and fault.action == "gap":
                continue
            if produced == fault.after and fault.action == "stray":
                put(
                    decode_pb2.SequenceOutput(
                        handle=submit.handle, attempt=submit.attempt + 7, first_index=index, token_ids=[9]
                    )
                )
            put(output)
            if produced == fault.after and fault.action == "repeat":
                put(output)


class ScriptedWorker:
    """One worker of either role on a free port."""

    def __init__(self, role: Role, name: str, script: Script, **record: Any) -> None:
        self.role: Role = role
        self.name = name
        self.server = RpcServer("127.0.0.1", 0)
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


def make_record(role: Role, name: str, **overrides: Any) -> WorkerRecord:
    values: dict[str, Any] = {
        "worker_id": name, "role": role, "address": "127.0.0.1:1", "model": "tiny", "arena_id": "a", "block_size": 16,
        "pairing": "p", "hash_domain": "00", "max_model_len": 512, "max_num_seqs": 8,
    }  # fmt: skip
    return WorkerRecord(**{**values, **overrides})
