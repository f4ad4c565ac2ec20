"""Estimates the cost of swapping a group and of giving it back, from recent copies and steps. Uses no clock.

Swapping moves the group's blocks twice: 2 * bytes / rate. The rate is measured over copies in either direction.

Giving a group back prefills it again. A decode worker does not see prefill, but the time of a step is close to a + b *
tokens: `a` reads the weights, and `b` is the cost of one more token, which prefill pays for each token. Both are fitted
over recent steps of different sizes. As long as all steps have had the same size, `b` is the whole time per token. The
estimate does not consider blocks that prefill would find cached: blocks have just run out, so cached ones are evicted
next. It does not consider queues and hops either. The choice affects only time; the tokens are the same.
"""

from __future__ import annotations

from common.line_fit import LineFit

_START_BYTES_PER_S = 2e9
"""Rate before the first copy is measured: that of a slow laptop."""


class Costs:
    """An estimator of the costs of swapping and of giving back, in seconds."""

    def __init__(self) -> None:
        self._steps = LineFit()
        """Seconds of a step by its number of tokens."""
        self.copy_bytes_per_s = _START_BYTES_PER_S

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """Records how long the forward pass of a step took."""
        self._steps.note(num_tokens, seconds)

    def note_copy(self, num_bytes: int, seconds: float) -> None:
        """Records a copy of blocks to or from the host tier."""
        if num_bytes > 0 and seconds > 0:
            self.copy_bytes_per_s += 0.3 * (num_bytes / seconds - self.copy_bytes_per_s)

    def token_s(self) -> float:
        """Returns the cost of one more token in a forward pass, in seconds, or 0.0 before the first step."""
        return self._steps.slope

    @property
    def step_s(self) -> float:
        """The mean time of recent steps, or 0.0 before the first step."""
        return self._steps.mean_y

    def swap_s(self, num_bytes: int) -> float:
        """Returns the time to copy blocks out and back in."""
        return 2 * num_bytes / self.copy_bytes_per_s

    def give_back_s(self, num_tokens: int) -> float:
        """Returns the time to prefill this number of positions."""
        return num_tokens * self.token_s()

    def swap_pays(self, num_bytes: int, num_tokens: int) -> bool:
        """Returns whether swapping is estimated to cost at most as much as giving back. True before the first step."""
        return self._steps.weight == 0.0 or self.swap_s(num_bytes) <= self.give_back_s(num_tokens)
