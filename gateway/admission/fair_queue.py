"""Deficit round robin between tenants (Shreedhar and Varghese, 1996), first come first served within one.

Tenants take turns; with each turn a tenant may spend a quantum more, and what it does not spend it keeps while it has
something waiting. So two tenants that both wait get the same number of tokens, but for a quantum and two requests, over
any stretch of time, whatever the size and number of their requests. Independent of asyncio, places and priorities.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Line(Generic[T]):
    """What one tenant waits for, and what it may still spend in this turn."""

    deficit: int = 0
    items: deque[tuple[int, T]] = field(default_factory=deque)
    """(cost, item), in the order of their arrival."""
    cost: int = 0
    """Of all items."""


class FairQueue(Generic[T]):
    """Items of several tenants. The front line is the one whose turn it is; it has had its quantum for this turn."""

    def __init__(self, quantum: int) -> None:
        self._quantum = quantum
        self._lines: OrderedDict[str, _Line[T]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(line.items) for line in self._lines.values())

    def __bool__(self) -> bool:
        return bool(self._lines)

    def push(self, tenant: str, cost: int, item: T) -> None:
        """Put an item behind all others of its tenant. A tenant that had none takes its turn after all others."""
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = _Line(0 if self._lines else self._quantum)
        line.items.append((cost, item))
        line.cost += cost

    def tenants(self) -> list[str]:
        """The tenants that have something waiting, in the order of their turns."""
        return list(self._lines)

    def costs(self) -> dict[str, int]:
        """What each tenant waits for, in all."""
        return {tenant: line.cost for tenant, line in self._lines.items()}

    def first(self, tenant: str) -> T | None:
        """A tenant's first item, None if it has none."""
        line = self._lines.get(tenant)
        return None if line is None else line.items[0][1]

    def head(self) -> T:
        """Whose turn it is. It stays the same until it is popped or discarded, whatever is added meanwhile.

        Raises IndexError when empty.
        """
        line = self._front()
        if line.deficit < line.items[0][0]:
            self._skip_idle_rounds()
        while line.deficit < line.items[0][0]:
            self._lines.move_to_end(next(iter(self._lines)))
            line = self._front()
            line.deficit += self._quantum
        return line.items[0][1]

    def pop(self) -> T:
        """Take the head out, and its cost from what its tenant may spend."""
        self.head()
        return self.take(next(iter(self._lines)))

    def take(self, tenant: str) -> T:
        """Take a tenant's first item out before its turn, and its cost from what the tenant may spend."""
        line = self._lines[tenant]
        cost, item = line.items.popleft()
        line.deficit -= cost
        line.cost -= cost
        self._drop_if_empty(tenant)
        return item

    def discard(self, tenant: str, item: T) -> bool:
        """Take an item out that no longer waits; False if it is gone."""
        line = self._lines.get(tenant)
        found = None if line is None else next((entry for entry in line.items if entry[1] is item), None)
        if line is None or found is None:
            return False
        line.items.remove(found)
        line.cost -= found[0]
        self._drop_if_empty(tenant)
        return True

    def _front(self) -> _Line[T]:
        if not self._lines:
            raise IndexError("the queue is empty")
        return next(iter(self._lines.values()))

    def _skip_idle_rounds(self) -> None:
        """Rounds in which nobody could afford its head, at once: a head may cost thousands of quanta."""
        turns = min(-(-(line.items[0][0] - line.deficit) // self._quantum) for line in self._lines.values())
        if turns > 1:
            for line in self._lines.values():
                line.deficit += (turns - 1) * self._quantum

    def _drop_if_empty(self, tenant: str) -> None:
        """A tenant without anything waiting saves nothing up, else it could later take everything for a while."""
        if self._lines[tenant].items:
            return
        was_front = next(iter(self._lines)) == tenant
        del self._lines[tenant]
        if was_front and self._lines:
            self._front().deficit += self._quantum
