"""Takes away a block during a model step, before or after the model reads it, for tests of the reader rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from engine.model_runner import ModelRunner
from engine.step import StepInput
from kernels.sampling import RepeatedSample

When = Literal["before it is read", "after it is read"]


class Meddler:
    """A replacement for `runner.step`. Once `is_armed` is set, it takes away one block before or after a real step."""

    def __init__(
        self, runner: ModelRunner, take: Callable[[int], object], when: When, pick: Callable[[StepInput], int | None]
    ) -> None:
        """Creates the replacement. `take` takes a block away; `pick` returns the block to take in a step, or None to
        leave the step undisturbed.
        """
        self._step = runner.step
        self._take, self._when, self._pick = take, when, pick
        self.is_armed = False
        self.taken: int | None = None
        self.batch: StepInput | None = None
        """The input of the step in which the block was taken."""

    def __call__(self, batch: StepInput, draw: RepeatedSample | None = None) -> Any:
        block = self._pick(batch) if self.is_armed and self.taken is None else None
        if block is None:
            return self._step(batch, draw)
        self.taken, self.batch = block, batch
        if self._when == "before it is read":
            self._take(block)
            return self._step(batch, draw)
        logits = self._step(batch, draw)
        self._take(block)
        return logits
