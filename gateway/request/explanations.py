"""Keeps a bounded number of explanations of recent requests."""

from __future__ import annotations

from collections import deque
from itertools import islice

from gateway.request.explanation import Explanation


class Explanations:
    """The explanations of one gateway's recent requests. A tenant finds only its own explanations."""

    def __init__(self, most: int) -> None:
        """`most` is the maximum number of requests that are kept. 0 keeps none."""
        self.most = most
        self._by_tenant: dict[str, deque[Explanation]] = {}
        self._count = 0

    def add(self, explanation: Explanation) -> None:
        """Keeps an explanation. Beyond the limit, drops the oldest explanation of the tenant that has the most
        explanations.
        """
        if not self.most:
            return
        self._by_tenant.setdefault(explanation.tenant, deque()).append(explanation)
        self._count += 1
        if self._count > self.most:
            tenant, largest = max(self._by_tenant.items(), key=lambda item: len(item[1]))
            largest.popleft()
            self._count -= 1
            if not largest:
                del self._by_tenant[tenant]

    def find(self, tenant: str, request_id: str | None, limit: int) -> list[Explanation]:
        """Returns at most `limit` explanations of a tenant, newest first. If `request_id` is not None, returns only
        explanations with this id.
        """
        own = reversed(self._by_tenant.get(tenant, deque()))
        return list(islice((e for e in own if request_id in (None, e.request_id)), limit))
