"""Faults that the suite's entry points install in a worker. No setting of a service enables a fault.

The entry points `faulty_prefill` and `faulty_decode` call `install` and then run the service. The variable
LOOSELEAF_CHAOS contains the faults as the JSON of a `Faults` object.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any

from block_store.arena.arena import Arena
from block_store.ledger.client import LedgerClient
from decode_svc.worker import DecodeWorker
from engine.model_runner import ModelRunner
from prefill_svc.worker import PrefillWorker
from testing.chaos.late import count_late_calls

VARIABLE = "LOOSELEAF_CHAOS"
PACKAGES = {f"{role}_svc": f"testing.chaos.faulty_{role}" for role in ("prefill", "decode")}
"""The entry points of workers with faults."""
PHASES = ("fill", "before seal", "after seal", "hand-over")
"""The phases in which a prefill worker can be told to die: after a step has stored KV, before and after the ledger's
call `seal`, and after the call `hand_over`, when the ticket exists but the gateway has not received it.
"""
DIED = "chaos: dies in phase "


@dataclass(frozen=True, slots=True)
class Faults:
    """The faults of a worker."""

    death_notes: str | None = None
    """A directory, or None for no such fault. If it contains a file with the worker's name, the worker dies in the
    phase that the file names.
    """
    stop_notes: str | None = None
    """A directory, or None for no such fault. If it contains a file with the worker's name, the worker stops at the
    beginning of its next forward pass.
    """
    poison_token: int | None = None
    """A token that kills the worker that computes it, or None for no such token."""
    lease_s: float | None = None
    """The lease of the worker in seconds, or None for the default. The worker sends six beats per lease."""
    reader_rule: bool = True
    """Whether the worker applies the reader rule, which compares block tables with the header."""
    late_counted: bool = False
    """Whether the ledger counts the calls that the worker makes after it has been fenced. This is not a fault."""

    def variables(self) -> dict[str, str]:
        """Returns the environment variables that describe these faults."""
        return {VARIABLE: json.dumps(asdict(self))}


def install() -> None:
    """Installs the faults in this process. Call this once, before the service's `main`."""
    faults = Faults(**json.loads(os.environ.get(VARIABLE, "{}")))
    if faults.lease_s is not None:
        register = LedgerClient.register
        _replace(LedgerClient, "register", partial(register, lease_s=faults.lease_s, beat_s=faults.lease_s / 6))
    if faults.poison_token is not None:
        _replace(ModelRunner, "step", _dying_of(faults.poison_token, ModelRunner.step))
    if faults.death_notes is not None:
        _install_deaths(Path(faults.death_notes) / _worker_id(sys.argv))
    if faults.stop_notes is not None:
        note = Path(faults.stop_notes) / _worker_id(sys.argv)
        _replace(ModelRunner, "step", _first(ModelRunner.step, lambda: _stop_if_told(note)))
    if faults.late_counted:
        count_late_calls()
    if not faults.reader_rule:
        _switch_off_the_reader_rule()


def _switch_off_the_reader_rule() -> None:
    _replace(Arena, "check_refs", lambda *_: True)  # blocks to swap out; sources of copies
    for worker in (DecodeWorker, PrefillWorker):
        _replace(worker, "_check", lambda *_: True)


def _install_deaths(note: Path) -> None:
    _replace(ModelRunner, "step", _then(ModelRunner.step, lambda: _die_if_told(note, "fill")))
    seal = _then(LedgerClient.seal, lambda: _die_if_told(note, "after seal"))
    _replace(LedgerClient, "seal", _first(seal, lambda: _die_if_told(note, "before seal")))
    _replace(LedgerClient, "hand_over", _then(LedgerClient.hand_over, lambda: _die_if_told(note, "hand-over")))


def _die_if_told(note: Path, phase: str) -> None:
    if note.exists() and note.read_text() == phase:
        note.unlink()
        _die(phase)


def _stop_if_told(note: Path) -> None:
    if note.exists():
        note.unlink()
        os.kill(os.getpid(), signal.SIGSTOP)


def _die(phase: str) -> None:
    os.write(2, f"{DIED}{phase}\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)


def _dying_of(token: int, step: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(step)
    def dying(runner: ModelRunner, batch: Any, *args: Any) -> Any:
        if token in batch.token_ids:
            _die("poison")
        return step(runner, batch, *args)

    return dying


def _first(call: Callable[..., Any], before: Callable[[], None]) -> Callable[..., Any]:
    @wraps(call)
    def both(*args: Any, **kwargs: Any) -> Any:
        before()
        return call(*args, **kwargs)

    return both


def _then(call: Callable[..., Any], after: Callable[[], None]) -> Callable[..., Any]:
    @wraps(call)
    def both(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        after()
        return result

    return both


def _worker_id(argv: list[str]) -> str:
    return argv[argv.index("--worker-id") + 1]


def _replace(owner: type, name: str, by: Any) -> None:
    setattr(owner, name, by)
