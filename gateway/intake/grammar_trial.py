"""Tries clients' grammars in a separate process before their requests start, and caches the verdicts.

Only compiling shows whether a grammar is valid, and a hostile grammar can crash the compiler (a Lark grammar with a
chain of 4,000 rules) or keep it busy (a `multipleOf` of a large number: 5 s). In a trial, a hostile grammar costs only
a child of `gateway.intake.grammar_process`, and the client receives status 400. Workers receive only grammars that have
passed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from itertools import count
from pathlib import Path

from common.errors import Internal, InvalidArgument, LooseleafError, ResourceExhausted, Unavailable
from common.types import StructuredOutput

MAX_VERDICTS = 1024
"""Number of cached verdicts. The most recently used verdicts are kept."""
MAX_AT_ONCE = 2
"""Number of trials that run at the same time. Each trial takes at most `grammar_process.CPU_S` of one core."""
MAX_WAITING = 64
PATIENCE_S = 10.0
"""Wall time limit of a trial in seconds. A trial exceeds it only on an overloaded machine, because its CPU time is
limited.
"""
NUM_TRIES = 2
"""Maximum number of attempts at a trial if the process ends during the trial."""
_ROOT = Path(__file__).parents[2]
logger = logging.getLogger("gateway")


class GrammarTrials:
    """A cache of verdicts on grammars, for use in the event loop. It runs a trial for each new grammar."""

    def __init__(self, directory: str, vocab_size: int) -> None:
        """`directory` is the model's directory, and `vocab_size` is the number of columns of the model's logits."""
        self._command = [sys.executable, "-m", "gateway.intake.grammar_process", str(directory), str(vocab_size)]
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()
        self._running: dict[bytes, asyncio.Task[str | None]] = {}
        self._places = asyncio.Semaphore(MAX_AT_ONCE)
        self._starting = asyncio.Lock()
        self._process: _TrialProcess | None = None

    async def check(self, name: str, wanted: StructuredOutput) -> None:
        """Returns if the grammar can be used. Raises InvalidArgument for the field `name` if it cannot,
        ResourceExhausted if too many grammars are waiting, Unavailable if the trial takes too long or its process keeps
        ending, and Internal if the trial fails for another reason.
        """
        digest = wanted.digest
        if digest not in self._verdicts:
            if (task := self._running.get(digest)) is None:
                if len(self._running) >= MAX_WAITING:
                    raise ResourceExhausted("too many new grammars are waiting to be compiled", retry_after_s=1.0)
                task = self._running[digest] = asyncio.create_task(self._try(wanted))
                task.add_done_callback(lambda _: self._running.pop(digest, None))
            self._keep(digest, await asyncio.shield(task))
        self._verdicts.move_to_end(digest)
        if (error := self._verdicts[digest]) is not None:
            raise InvalidArgument.of(name, error)

    async def warm(self) -> None:
        """Starts the trial process, so that the first trial does not wait for it."""
        async with self._starting:
            await self._started()

    async def close(self) -> None:
        for task in self._running.values():
            task.cancel()
        if self._process is not None:
            await self._process.close()

    def _keep(self, digest: bytes, error: str | None) -> None:
        self._verdicts[digest] = error
        if len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)

    async def _try(self, wanted: StructuredOutput) -> str | None:
        """Returns a description of the error in a grammar, or None if the grammar is valid. Raises Unavailable if the
        trial takes too long or its process keeps ending, and Internal if the trial fails for another reason.
        """
        failure: LooseleafError = Unavailable("the process that tries grammars has ended", retry_after_s=1.0)
        async with self._places:
            for _ in range(NUM_TRIES):
                async with self._starting:
                    process = await self._started()
                try:
                    async with asyncio.timeout(PATIENCE_S):
                        return await process.ask(wanted)
                except TimeoutError:
                    raise Unavailable("the grammar could not be compiled in time", retry_after_s=1.0) from None
                except ConnectionError:
                    logger.warning("the process that tries grammars has ended and is restarted")
        raise failure

    async def _started(self) -> _TrialProcess:
        if self._process is None or self._process.has_ended:
            if self._process is not None:
                await self._process.close()
            environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])}
            child = await asyncio.create_subprocess_exec(*self._command, stdin=PIPE, stdout=PIPE, env=environment)
            self._process = _TrialProcess(child)
        return self._process


class _TrialProcess:
    """A client of one trial process, with the trials that the process has not answered."""

    def __init__(self, child: Process) -> None:
        self._child = child
        self._numbers = count()
        self._asked: dict[int, asyncio.Future[str | None]] = {}
        self._reader = asyncio.create_task(self._read())

    @property
    def has_ended(self) -> bool:
        return self._reader.done()

    async def ask(self, wanted: StructuredOutput) -> str | None:
        """Returns a description of the error in a grammar, or None if the grammar is valid. Raises ConnectionError if
        the process ends first, and Internal if the trial fails.
        """
        number = next(self._numbers)
        trial = {"id": number, "kind": wanted.kind, "source": wanted.source, "options": wanted.options}
        verdict: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._asked[number] = verdict
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(trial).encode() + b"\n")
            await self._child.stdin.drain()
            return await verdict
        finally:
            self._asked.pop(number, None)

    async def close(self) -> None:
        if self._child.returncode is None:
            self._child.kill()
        await self._child.wait()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self) -> None:
        assert self._child.stdout is not None
        try:
            while line := await self._child.stdout.readline():
                verdict = json.loads(line)
                asked = self._asked.get(verdict["id"])
                if asked is None or asked.done():
                    continue
                if verdict["has_failed"]:
                    asked.set_exception(Internal("the grammar could not be tried; the gateway's log says why"))
                else:
                    asked.set_result(verdict["error"])
        finally:
            for asked in self._asked.values():
                if not asked.done():
                    asked.set_exception(ConnectionError())
