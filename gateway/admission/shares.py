"""Counts the places of each tenant at the gate, and decides which tenants may start requests even if all places are
taken.

A tenant that has less than an even share of the places may start requests beyond the limit, with a reserved place.
Workers preempt requests without a reserved place first. A tenant can have only a few sequences, or one request, with
reserved places at a time, and all tenants together at most half of all places. Requests without a reserved place
therefore also make progress.
"""

from __future__ import annotations

from dataclasses import dataclass

RESERVED_SHARE = 16
"""A tenant's reserved sequences are at most `capacity // RESERVED_SHARE`, unless they belong to a single request."""


@dataclass(slots=True)
class _Holding:
    """The sequence counts of one tenant."""

    inside: int = 0
    reserved: int = 0
    """Sequences that have a reserved place."""
    waiting: int = 0


class Shares:
    """A table of the sequence counts of all active tenants. It decides which tenants may use a reserved place."""

    def __init__(self) -> None:
        self._holdings: dict[str, _Holding] = {}
        self._reserved = 0

    @property
    def num_tenants(self) -> int:
        return len(self._holdings)

    def may_reserve(self, tenant: str, priority: int, weight: int, capacity: int) -> bool:
        """Returns whether the tenant may start `weight` more sequences even if all `capacity` places are taken.

        The tenant may not if there is no other tenant, if `priority` is above 0 (the request can wait), or if an even
        share or a limit on reserved places would be exceeded.
        """
        holding = self._holdings.get(tenant) or _Holding()
        present = len(self._holdings) + (tenant not in self._holdings)
        if present < 2 or priority > 0 or self._reserved + weight > capacity // 2:
            return False
        if holding.inside + weight > max(1, capacity // present):  # an even share
            return False
        return not holding.reserved or holding.reserved + weight <= capacity // RESERVED_SHARE

    def wait(self, tenant: str, weight: int) -> None:
        """Notes that a request of `weight` sequences waits."""
        self._holding(tenant).waiting += weight

    def wait_no_more(self, tenant: str, weight: int) -> None:
        """Notes that a request no longer waits, because it has been let in (call `enter` first) or has given up."""
        self._holdings[tenant].waiting -= weight
        self._drop_if_empty(tenant)

    def enter(self, tenant: str, weight: int, *, reserved: bool) -> None:
        holding = self._holding(tenant)
        holding.inside += weight
        if reserved:
            holding.reserved += weight
            self._reserved += weight

    def leave(self, tenant: str, weight: int, *, reserved: bool) -> None:
        holding = self._holdings[tenant]
        holding.inside -= weight
        if reserved:
            holding.reserved -= weight
            self._reserved -= weight
        self._drop_if_empty(tenant)

    def _holding(self, tenant: str) -> _Holding:
        return self._holdings.setdefault(tenant, _Holding())

    def _drop_if_empty(self, tenant: str) -> None:
        holding = self._holdings[tenant]
        if not holding.inside and not holding.waiting:
            del self._holdings[tenant]
