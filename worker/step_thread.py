"""The thread that runs a worker's model, and the inbox of this thread's commands."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from worker.fair_lock import AnyFairLock

Command = Callable[[], None]
logger = logging.getLogger("step")


class StepThread:
    """A thread that runs posted commands and steps alternately.

    `step()` returns the number of seconds for which the thread waits for a command before the next step. 0 means that
    it continues at once, and None means that it waits without a limit.
    """

    def __init__(self, step: Callable[[], float | None], turns: AnyFairLock | None = None) -> None:
        """Creates the thread. Threads and processes that share `turns` take turns in stepping. Commands do not wait for
        a turn.
        """
        self._step = step
        self._turns = turns
        self._on_failure: Callable[[], object] = lambda: None
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="step", daemon=True)
        self._has_failed = False

    def start(self, on_failure: Callable[[], object]) -> None:
        """Starts the thread. If an exception ends the thread, it calls `on_failure`."""
        self._on_failure = on_failure
        self._thread.start()

    def post(self, command: Command) -> None:
        """Makes the step thread run `command` before its next step. May be called from any thread."""
        self._inbox.put(command)

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread after the current step. Returns False if something may still write into blocks, because the
        thread is still running, or because an exception ended it, perhaps while work was queued on a device.
        """
        self._inbox.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and not self._has_failed

    def _run(self) -> None:
        wait: float | None = None
        try:
            while self._drain(wait):
                wait = self._step() if self._turns is None else self._step_in_turn(self._turns)
        except BaseException:
            self._has_failed = True
            logger.exception("the step thread failed")
            self._on_failure()  # so that the service notices that its model thread has ended

    def _step_in_turn(self, turns: AnyFairLock) -> float | None:
        with turns:
            wait = self._step()
            turns.note_work(wait is not None)
        return wait

    def _drain(self, wait: float | None) -> bool:
        """Runs all queued commands, after waiting up to `wait` seconds for the first command. Returns False if the
        thread must stop.
        """
        try:
            command = self._inbox.get(timeout=wait) if wait != 0.0 else self._inbox.get_nowait()
            while command is not None:
                command()
                command = self._inbox.get_nowait()
        except queue.Empty:
            return True
        return False
