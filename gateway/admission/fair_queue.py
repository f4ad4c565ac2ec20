"""A queue with deficit round robin between tenants (Shreedhar and Varghese, 1996). A tenant's items leave in the order
of their arrival.

Tenants take turns. Each turn adds a quantum to a tenant's credit, and the tenant keeps unused credit while it has
waiting items. A tenant therefore gets its share regardless of how many items the other tenants have. This module does
not depend on asyncio, places or priorities.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Line(Generic[T]):
    """The queue of one tenant's waiting items, with the credit that the tenant has left."""

    deficit: int = 0
    items: deque[tuple[int, T]] = field(default_factory=deque)
    """Pairs (cost, item), in order of arrival."""
    cost: int = 0
    """Total cost of the items."""


class FairQueue(Generic[T]):
    """A queue that serves several tenants by deficit round robin. The tenant whose turn it is has already received its
    quantum.
    """

    def __init__(self, quantum: int) -> None:
        self._quantum = quantum
        self._lines: OrderedDict[str, _Line[T]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(line.items) for line in self._lines.values())

    def __bool__(self) -> bool:
        return bool(self._lines)

    def push(self, tenant: str, cost: int, item: T) -> None:
        """Adds an item behind the tenant's other items. A tenant that had no items gets its turn after the tenants that
        wait.
        """
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = _Line(0 if self._lines else self._quantum)
        line.items.append((cost, item))
        line.cost += cost

    def tenants(self) -> list[str]:
        """Returns the tenants that have waiting items, in round-robin order."""
        return list(self._lines)

    def costs(self) -> dict[str, int]:
        """Returns the total cost of each tenant's items."""
        return {tenant: line.cost for tenant, line in self._lines.items()}

    def first(self, tenant: str) -> T | None:
        """Returns a tenant's first item, or None if the tenant has no items."""
        line = self._lines.get(tenant)
        return None if line is None else line.items[0][1]

    def head(self) -> T:
        """Returns the item whose turn it is. The head does not change when items are added.

        Raises IndexError if the queue is empty.
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
        """Removes and returns the item whose turn it is, and subtracts its cost from its tenant's credit. Raises
        IndexError if the queue is empty.
        """
        self.head()
        return self.take(next(iter(self._lines)))

    def take(self, tenant: str) -> T:
        """Removes and returns the tenant's first item, even if it is not the tenant's turn, and subtracts the item's
        cost from the tenant's credit.
        """
        line = self._lines[tenant]
        cost, item = line.items.popleft()
        line.deficit -= cost
        line.cost -= cost
        self._drop_if_empty(tenant)
        return item

    def discard(self, tenant: str, item: T) -> bool:
        """Removes an item that is no longer waiting. Returns False if the item is not in the queue."""
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
        """Skips the rounds in which no tenant can afford its first item. An item may cost thousands of quanta."""
        turns = min(-(-(line.items[0][0] - line.deficit) // self._quantum) for line in self._lines.values())
        if turns > 1:
            for line in self._lines.values():
                line.deficit += (turns - 1) * self._quantum

    def _drop_if_empty(self, tenant: str) -> None:
        """Removes the tenant if it has no items left in the queue. An idle tenant must not accumulate credit, or it
        could later monopolize the service for a while.
        """
        if self._lines[tenant].items:
            return
        was_front = next(iter(self._lines)) == tenant
        del self._lines[tenant]
        if was_front and self._lines:
            self._front().deficit += self._quantum
