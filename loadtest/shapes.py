"""Tells locust the number of users over time and, for open-loop runs, when the run ends and which user to start."""

from __future__ import annotations

import math
from collections.abc import Callable

from locust import LoadTestShape, User, constant, task

from loadtest.arrivals import Shape

Tick = tuple[int, float]
"""The number of users, and how many of them to start per second."""


class UsersShape(LoadTestShape):  # type: ignore[misc]
    """Varies the number of users, from --users to --shape-peak times as many, until --run-time or the last step."""

    abstract = True
    use_common_options = True

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._shape = shape

    def tick(self) -> Tick | None:
        options = self.runner.environment.parsed_options
        now = self.get_run_time()
        factor = self._shape.factor(now)
        if factor is None or (options.run_time and now >= options.run_time):
            return None
        users = math.ceil((options.num_users or 1) * factor)
        return users, max(float(options.spawn_rate or 1), users)


class OpenLoopUser(User):  # type: ignore[misc]
    """A user that does nothing. Locust starts one in each process; the requests are sent by the process's `Replay`, so
    that none is lost or repeated when locust moves users between processes.
    """

    wait_time = constant(1)  # type: ignore[misc]

    @task
    def idle(self) -> None:
        pass


class OpenLoopShape(LoadTestShape):  # type: ignore[misc]
    """Keeps one user in each process until all requests have been sent and answered, or until --run-time."""

    abstract = True

    def __init__(self, num_processes: Callable[[], int], is_over: Callable[[], bool]) -> None:
        super().__init__()
        self._num_processes, self._is_over = num_processes, is_over
        self._tick: Tick | None = None

    def reset_time(self) -> None:
        super().reset_time()
        self._tick = None

    def tick(self) -> Tick | None:
        run_time = self.runner.environment.parsed_options.run_time
        if self._tick is None:
            count = max(1, self._num_processes())
            self._tick = (count, float(count))
        elif self._is_over() or (run_time and self.get_run_time() >= run_time):
            return None
        return self._tick
