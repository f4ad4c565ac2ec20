"""What it would cost to swap a group or to give it back, from what copies and steps have cost lately. No I/O, no clock.

Swapping moves the group's blocks twice: 2 * bytes / rate, the rate measured over copies of either direction.

Giving back prefills them again. A decode worker sees no prefill, but a step's time is close to a + b * tokens: `a`
reads the weights, `b` is what one token more costs, which is what prefill pays per token. Both are fitted over recent
steps of different sizes; while all were of one size the whole time of a token stands for `b`. Blocks that prefill would
find cached are not known here: blocks just ran out, so cached ones are the next to go. Nor are queues and hops. The
choice costs time only; tokens are the same either way.
"""

from __future__ import annotations

_DECAY = 0.98
"""Weight of the past at each step: about the last fifty count."""
_START_BYTES_PER_S = 2e9
"""Before the first copy was measured; a slow laptop's."""


class Costs:
    """Seconds, estimated."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self.copy_bytes_per_s = _START_BYTES_PER_S

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """A step's forward pass took this long."""
        x, y = float(num_tokens), seconds
        self._weight = self._weight * _DECAY + 1.0
        self._x = self._x * _DECAY + x
        self._y = self._y * _DECAY + y
        self._xx = self._xx * _DECAY + x * x
        self._xy = self._xy * _DECAY + x * y

    def note_copy(self, num_bytes: int, seconds: float) -> None:
        """Blocks were copied to or from the host tier."""
        if num_bytes > 0 and seconds > 0:
            self.copy_bytes_per_s += 0.3 * (num_bytes / seconds - self.copy_bytes_per_s)

    def token_s(self) -> float:
        """What one token more costs in a pass; 0.0: no step was seen."""
        if self._weight == 0.0:
            return 0.0
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        if variance > 0.01 * mean_x * mean_x:
            slope = (self._xy / self._weight - mean_x * mean_y) / variance
            if slope > 0.0:
                return min(slope, mean_y / mean_x)
        return mean_y / mean_x

    @property
    def step_s(self) -> float:
        """A step of late; 0.0: none was seen."""
        return self._y / self._weight if self._weight else 0.0

    def swap_s(self, num_bytes: int) -> float:
        """Out and in."""
        return 2 * num_bytes / self.copy_bytes_per_s

    def give_back_s(self, num_tokens: int) -> float:
        """Prefill of so many positions."""
        return num_tokens * self.token_s()

    def swap_pays(self, num_bytes: int, num_tokens: int) -> bool:
        """Whether swapping is the cheaper; while no step was seen it is taken to be."""
        return self._weight == 0.0 or self.swap_s(num_bytes) <= self.give_back_s(num_tokens)
