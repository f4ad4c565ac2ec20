"""The process in which the gateway tries grammars: `python -m gateway.intake.grammar_process DIRECTORY VOCAB_SIZE`.

It loads the tokenizer once and forks a child for every grammar. The child compiles under limits on CPU time, stack and
address space, so a grammar that makes the compiler loop or crash ends only its own child.

Standard input contains one trial per line (`TRIAL`), and standard output one verdict per line:
`{"id": 1, "error": null, "has_failed": false}`. If a trial fails for a reason other than its grammar, `has_failed` is
true, and the reason is logged on standard error.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import select
import signal
import sys
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer

from common.grammar import GrammarError, compile_grammar, explore, load_tokenizer
from common.types import StructuredOutput

CPU_S = 0.15
"""CPU time limit of a trial in seconds. Ordinary grammars take a few milliseconds; 500 properties with patterns take 56
ms.
"""
STACK_BYTES = 2 << 20
"""Stack size of a trial in bytes. Workers compile with a larger stack, so a grammar that has passed should not overflow
theirs.
"""
MEMORY_BYTES = 256 << 20
"""Additional address space, in bytes, that a trial may use."""
MAX_LINE_BYTES = 4096
"""Size limit of a verdict: PIPE_BUF. Several children write to the same pipe, and writes up to this size are atomic."""
TRIAL = {"id": 0, "kind": "regex", "source": "", "options": []}
logger = logging.getLogger("grammars")
_TOO_LONG = f"takes more than {CPU_S:g} s to compile"
_CRASHED = "cannot be compiled: it is nested too deeply or needs too much memory"


def main(directory: str, vocab_size: int) -> None:
    """Serves trials until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C stops the gateway, whose end closes standard input
    tokenizer, failure = _load(directory, vocab_size)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, int] = {}
    rest = b""
    while True:
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _reap(children)
        if 0 in ready:
            if not (more := os.read(0, 1 << 16)):
                return
            *lines, rest = (rest + more).split(b"\n")
            for line in lines:
                trial = json.loads(line)
                if tokenizer is None:
                    _tell(trial["id"], failure)
                else:
                    children[_fork(tokenizer, trial)] = trial["id"]


def _load(directory: str, vocab_size: int) -> tuple[LLTokenizer | None, str]:
    try:
        return load_tokenizer(directory, vocab_size), ""
    except GrammarError as error:
        return None, str(error)


def _fork(tokenizer: LLTokenizer, trial: dict[str, Any]) -> int:
    """Starts a trial. Returns the child's process id."""
    if pid := os.fork():
        return pid
    try:
        _tell(trial["id"], _verdict(tokenizer, trial))
        os._exit(0)
    except BaseException:  # llguidance's panics are not of the class Exception
        logger.exception("a grammar could not be tried")
    finally:
        os._exit(1)


def _verdict(tokenizer: LLTokenizer, trial: dict[str, Any]) -> str | None:
    try:
        _bound()
        wanted = StructuredOutput(trial["kind"], trial["source"], tuple(trial["options"]))
        explore(tokenizer, compile_grammar(tokenizer, wanted))
    except GrammarError as error:
        return str(error)
    except MemoryError:
        return _CRASHED
    return None


def _bound() -> None:
    """Sets the limits of this process. The system enforces them, even while the compiler does not return to Python."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _reap(children: dict[int, int]) -> None:
    """Reports verdicts for children that were killed by a signal, and failures of the others. Children that succeed
    report their verdicts themselves.
    """
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        number = children.pop(pid)
        if os.WIFSIGNALED(status):
            _tell(number, _TOO_LONG if os.WTERMSIG(status) == signal.SIGPROF else _CRASHED)
        elif status:
            _tell(number, None, has_failed=True)


def _tell(number: int, error: str | None, *, has_failed: bool = False) -> None:
    line = json.dumps({"id": number, "error": error, "has_failed": has_failed}).encode() + b"\n"
    assert len(line) <= MAX_LINE_BYTES
    os.write(1, line)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
