"""Estimates the costs of swapping a group and of giving it back, from recent copies and steps. Swapping copies the
group's blocks twice: 2 * bytes / rate. The rate is measured over copies in both directions. Giving a group back means
that it is prefilled again. Its cost is estimated from decode steps, whose duration is about a + b * tokens: `a` is the
time to read the weights, and `b` the time per token. Both are fitted to recent steps of different sizes. As long as all
steps have had the same size, `b` is the whole time per token. The estimate ignores blocks that prefill would find
cached, because cached blocks are evicted when blocks run out. It also ignores queues. The choice affects only time; the
tokens are the same.
"""

from __future__ import annotations

from collections import deque
from operator import itemgetter

from common.line_fit import LineFit

_START_BYTES_PER_S = 2e9
"""The rate that is assumed before the first copy. It is that of a slow laptop."""


class Costs:
    """An estimator of the costs of swapping and of giving back, in seconds."""

    def __init__(self) -> None:
        self._steps = LineFit()
        """Duration of a step in seconds, by its number of tokens."""
        self._latest: deque[tuple[int, float]] = deque(maxlen=3)
        self.copy_bytes_per_s = _START_BYTES_PER_S

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """Records the duration of a step's forward pass. Of every three steps in a row, the one with the median
        duration counts, because the first steps of a process and those that another process interrupts can take a
        hundred times as long as the others.
        """
        self._latest.append((num_tokens, seconds))
        if len(self._latest) == 3:
            self._steps.note(*sorted(self._latest, key=itemgetter(1))[1])

    def note_copy(self, num_bytes: int, seconds: float) -> None:
        """Records a copy of blocks to or from the host tier."""
        if num_bytes > 0 and seconds > 0:
            self.copy_bytes_per_s += 0.3 * (num_bytes / seconds - self.copy_bytes_per_s)

    def token_s(self) -> float:
        """Returns the time in seconds that one more token adds to a forward pass, or 0.0 before the third step."""
        return self._steps.slope

    @property
    def step_s(self) -> float:
        """The mean duration of recent steps in seconds, or 0.0 before the third step."""
        return self._steps.mean_y

    @property
    def fixed_s(self) -> float:
        """The part of a step's duration, in seconds, that does not depend on its number of tokens, or 0.0 before the
        third step.
        """
        return max(0.0, self._steps.at(0.0))

    def swap_s(self, num_bytes: int) -> float:
        """Returns the time in seconds to copy blocks out and back in."""
        return 2 * num_bytes / self.copy_bytes_per_s

    def give_back_s(self, num_tokens: int) -> float:
        """Returns the time in seconds to prefill this number of positions."""
        return num_tokens * self.token_s()

    def swap_pays(self, num_bytes: int, num_tokens: int) -> bool:
        """Returns whether swapping is estimated to cost at most as much as giving back. Returns True before the third
        step.
        """
        return self._steps.weight == 0.0 or self.swap_s(num_bytes) <= self.give_back_s(num_tokens)
