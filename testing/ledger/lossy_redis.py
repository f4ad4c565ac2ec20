"""A Redis client for tests that loses scripts or their answers on request."""

from __future__ import annotations

from typing import Any

import redis


class LossyRedis(redis.Redis):
    """A client that shares the connections of another client. On request, it loses the answers of scripts that the
    server has executed, or does not send scripts.
    """

    def __init__(self, client: redis.Redis) -> None:
        super().__init__(connection_pool=client.connection_pool)
        self.num_to_lose = 0
        """The number of answers to lose."""
        self.cuts_then = False
        """Whether, after these answers, no scripts are sent until `heal` is called."""
        self.num_lost = 0

    def lose(self, num_answers: int, cut: bool) -> None:
        self.num_to_lose, self.cuts_then = num_answers, cut

    def heal(self) -> None:
        self.num_to_lose, self.cuts_then = 0, False

    def execute_command(self, *args: Any, **options: Any) -> Any:
        if args[0] not in ("EVALSHA", "EVAL"):
            return super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        if not self.num_to_lose and self.cuts_then:
            raise redis.ConnectionError("cut by the test")
        answer = super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        if self.num_to_lose:
            self.num_to_lose -= 1
            self.num_lost += 1
            raise redis.TimeoutError("the answer was lost by the test")
        return answer
