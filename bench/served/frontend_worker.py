"""A real decode service with a step loop that computes nothing, and a prefill service that computes nothing.

`python -m bench.served.frontend_worker REDIS_URL MODEL` publishes both in the registry. It answers each line of its
input with the counts so far, as a line of JSON. `rate N` sets the number of steps per second; `mark` changes nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from block_store.errors import LedgerUnavailable
from block_store.redis.redis_server import open_client
from block_store.redis.registry import WorkerRegistry
from common.group_need import blocks_of
from common.rpc import RpcServer, wait_for_signal
from common.types import Role, WorkerLoad, WorkerRecord
from decode_svc.outputs import AnyOutput, PlainToken, Session
from decode_svc.scheduler import Group
from decode_svc.service import DecodeServicer
from protos.v1 import decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, types_pb2
from worker.adapters import AdapterPool
from worker.grammars import Grammars
from worker.step_thread import StepThread

BLOCK_SIZE = 16
MAX_NUM_SEQS = 1024
MAX_MODEL_LEN = 1 << 20
BEAT_S = 1.0
TEXT = (
    "Once upon a time a fox lived beside the old mill. When the wind was strong the wheel turned, and the fox said to "
    'the crow: "Come down, my friend, and share the bread with me." The crow did not believe a word of it. '
)


class Prefill(prefill_pb2_grpc.PrefillServiceServicer):
    """A prefill service that completes every prompt at once, and also the request if it asks for one token."""

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        is_over = request.stopping.max_tokens == 1
        ends = types_pb2.FINISH_REASON_LENGTH if is_over else types_pb2.FINISH_REASON_UNSPECIFIED
        tables = [types_pb2.BranchTables(num_tokens=len(request.prompt_token_ids)) for _ in request.branches]
        done = prefill_pb2.PrefillDone(
            ticket=None if is_over else types_pb2.Ticket(arena_id="bench", epoch=1, branches=tables),
            tokens=[
                prefill_pb2.BranchToken(sample_index=b.sample_index, token_id=5, finish_reason=ends)
                for b in request.branches
            ],
            load=types_pb2.WorkerLoad(),
        )
        yield prefill_pb2.PrefillResponse(done=done)


class CountingWorker:
    """A replacement for `decode_svc.worker.DecodeWorker`. A step gives every group the next token of a text."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.load = WorkerLoad()
        self.rate = 25.0
        self.num_tokens = 0
        self.own_ns = 0
        """The CPU time of the step loop, excluding `Session.send`. It is not part of the front end's time."""
        self._ids = token_ids
        self._sessions: list[Session] = []
        self._next_at = 0.0

    def submit(self, session: Session, group: Group, *_: object) -> None:
        if session not in self._sessions:
            self._sessions.append(session)
        session.groups[group.handle] = group

    def cancel(self, session: Session, handle: int, sample_index: int | None = None) -> None:
        session.groups.pop(handle, None)

    def close(self, session: Session) -> None:
        if session in self._sessions:
            self._sessions.remove(session)

    def step(self) -> float | None:
        """Runs a step if it is time for one. Returns the seconds until the next step, as `StepThread` expects."""
        now = time.monotonic()
        if now < self._next_at:
            return self._next_at - now
        self._next_at = max(self._next_at + 1 / self.rate, now)
        for session in self._sessions:
            began = time.thread_time_ns()
            outputs: list[AnyOutput] = [self._next(group) for group in session.groups.values()]
            self.num_tokens += len(outputs)
            self.own_ns += time.thread_time_ns() - began
            if outputs:
                session.send(outputs, self.load)
        return max(0.0, self._next_at - time.monotonic())

    def _next(self, group: Group) -> PlainToken:
        ids = group.sequences[0].output_ids
        token = self._ids[(group.handle + len(ids)) % len(self._ids)]
        ids.append(token)
        return PlainToken(group.handle, group.attempt, 0, len(ids) - 1, token)

    def counts(self) -> dict[str, int]:
        return {"pid": os.getpid(), "num_tokens": self.num_tokens, "own_ns": self.own_ns}


def answer_lines(worker: CountingWorker) -> None:
    """Answers lines until the input ends, and then ends the process."""
    for line in sys.stdin:
        command, *values = line.split()
        if command == "rate":
            worker.rate = float(values[0])
        print(json.dumps(worker.counts()), flush=True)
    os._exit(0)


def record(role: Role, address: str, model: str) -> WorkerRecord:
    return WorkerRecord(
        f"{role}-bench", role, address, model, "bench", BLOCK_SIZE, "00", "00", MAX_MODEL_LEN, MAX_NUM_SEQS,
        blocks_of(MAX_MODEL_LEN, BLOCK_SIZE) + 2,
    )  # fmt: skip


async def main(redis_url: str, model: str) -> None:
    worker = CountingWorker(Tokenizer.from_file(str(Path(model) / "tokenizer.json")).encode(TEXT).ids)
    thread = StepThread(worker.step)
    server = RpcServer("127.0.0.1", 0)
    prefill: Any = prefill_pb2_grpc.add_PrefillServiceServicer_to_server
    server.add(prefill, Prefill(), "looseleaf.v1.PrefillService")
    servicer: Any = DecodeServicer(worker, thread, 1 << 30, (Grammars(model, 1), AdapterPool(None, 1)))  # type: ignore[arg-type]
    server.add(decode_pb2_grpc.add_DecodeServiceServicer_to_server, servicer, "looseleaf.v1.DecodeService")
    await server.start()
    thread.start(lambda: os._exit(1))
    threading.Thread(target=answer_lines, args=(worker,), daemon=True).start()
    registry, address = WorkerRegistry(open_client(redis_url)), f"127.0.0.1:{server.port}"

    async def beat() -> None:
        while True:
            with suppress(LedgerUnavailable):  # a Redis that pauses, as it may on a busy machine
                for role in ("prefill", "decode"):
                    await asyncio.to_thread(registry.publish, record(role, address, model))
            await asyncio.sleep(BEAT_S)

    beats = asyncio.create_task(beat())
    await wait_for_signal(asyncio.Event())
    beats.cancel()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
