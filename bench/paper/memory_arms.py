"""Defines KV memory that is reserved contiguously or allocated in blocks, and runs it under the real decode scheduler.

The contiguous arms reserve memory for a whole request when it starts, with a buddy allocator, as the PagedAttention
paper assumes for Orca (section 6.1). The paged arm adds a block when a sequence needs one, and preempts the last
running sequence if no block is free; a preempted sequence needs its blocks again before it resumes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from common.group_need import blocks_of
from common.types import SamplingParams, StoppingParams
from decode_svc.scheduler import DecodeScheduler, Group
from engine.sequence import Sequence as Tokens

Kind = Literal["max", "pow2", "oracle"]
Lens = tuple[int, int]
"""The lengths of a request's prompt and output in tokens."""
Compute = Callable[[Sequence[Group], bool], Sequence[int]]
"""Returns the next token of each running group. The flag says whether the step counts for the shares."""


class Buddy:
    """A buddy allocator over `size` slots, which need not be a power of two."""

    def __init__(self, size: int) -> None:
        self._free: dict[int, set[int]] = {1 << order: set() for order in range(size.bit_length())}
        self._roots: set[tuple[int, int]] = set()
        start = 0
        for chunk in sorted(self._free, reverse=True):
            if size & chunk:
                self._free[chunk].add(start)
                self._roots.add((start, chunk))
                start += chunk

    def alloc(self, size: int) -> tuple[int, int] | None:
        """Returns (start, chunk) of a free chunk of at least `size` slots, or None if there is none."""
        wanted = 1 << (size - 1).bit_length()
        chunk = next((c for c in sorted(self._free) if c >= wanted and self._free[c]), None)
        if chunk is None:
            return None
        start = min(self._free[chunk])
        self._free[chunk].remove(start)
        while chunk > wanted:
            chunk //= 2
            self._free[chunk].add(start + chunk)
        return start, chunk

    def free(self, start: int, chunk: int) -> None:
        """Frees a chunk, and merges it with its free buddies."""
        while (start, chunk) not in self._roots:
            root = max(place for place, _ in self._roots if place <= start)
            buddy = root + ((start - root) ^ chunk)
            if buddy not in self._free[chunk]:
                break
            self._free[chunk].remove(buddy)
            start, chunk = min(start, buddy), 2 * chunk
        self._free[chunk].add(start)

    @property
    def num_free(self) -> int:
        return sum(chunk * len(starts) for chunk, starts in self._free.items())


class Arm(Protocol):
    """A way to allocate KV memory for sequences. `start` and `grow` return whether they found memory."""

    def start(self, group: Group) -> bool:
        """Allocates memory for the tokens of a group that starts or resumes."""

    def grow(self, group: Group) -> bool:
        """Allocates memory for the group's next token."""

    def end(self, group: Group) -> None:
        """Frees the memory of a group."""

    def taken(self) -> tuple[int, int]:
        """Returns (slots reserved for running requests, slots allocated for them)."""

    def blocks(self, group: Group, size: int) -> Sequence[int]:
        """Returns the numbers of the group's blocks of `size` slots, in order of its positions."""


class Contiguous:
    """An arm that reserves contiguous slots: for the longest sequence (max), for an output of the next power of two
    (pow2), or for the output's real length (oracle).
    """

    def __init__(self, kind: Kind, num_slots: int, max_len: int) -> None:
        self._kind, self._max_len, self._buddy = kind, max_len, Buddy(num_slots)
        self._held: dict[int, tuple[int, tuple[int, int]]] = {}

    def start(self, group: Group) -> bool:
        [sequence] = group.sequences
        prompt, output = len(sequence.prompt_ids), sequence.stopping.max_tokens
        rounded = 1 << (output - 1).bit_length()
        size = {"max": self._max_len, "pow2": min(self._max_len, prompt + rounded), "oracle": prompt + output}
        found = self._buddy.alloc(size[self._kind])
        if found is not None:
            self._held[group.handle] = size[self._kind], found
        return found is not None

    def grow(self, group: Group) -> bool:
        return True

    def end(self, group: Group) -> None:
        self._buddy.free(*self._held.pop(group.handle)[1])

    def taken(self) -> tuple[int, int]:
        held = self._held.values()
        return sum(size for size, _ in held), sum(chunk for _, (_, chunk) in held)

    def blocks(self, group: Group, size: int) -> Sequence[int]:
        start, chunk = self._held[group.handle][1]
        assert start % size == chunk % size == 0, "the chunk does not consist of whole blocks"
        return range(start // size, (start + chunk) // size)


class Paged:
    """An arm that allocates blocks as sequences grow."""

    def __init__(self, num_slots: int, block_size: int) -> None:
        self._size, self._free = block_size, list(range(num_slots // block_size))
        self._held: dict[int, list[int]] = {}

    def start(self, group: Group) -> bool:
        return self._take(group, blocks_of(group.sequences[0].num_tokens + 1, self._size))

    def grow(self, group: Group) -> bool:
        need = blocks_of(group.sequences[0].num_tokens + 1, self._size)
        return self._take(group, need - len(self._held[group.handle]))

    def _take(self, group: Group, num: int) -> bool:
        if num > len(self._free):
            return False
        self._held.setdefault(group.handle, []).extend(self._free.pop() for _ in range(num))
        return True

    def end(self, group: Group) -> None:
        self._free += self._held.pop(group.handle)

    def taken(self) -> tuple[int, int]:
        slots = self._size * sum(map(len, self._held.values()))
        return slots, slots

    def blocks(self, group: Group, size: int) -> Sequence[int]:
        assert self._size == size
        return self._held[group.handle]


@dataclass(slots=True)
class Shares:
    """The running requests, their tokens, and the slots reserved and allocated for them, each summed over the counted
    steps. `preempted` is the number of preemptions in all steps.
    """

    steps: int = 0
    running: int = 0
    tokens: int = 0
    reserved: int = 0
    allocated: int = 0
    preempted: int = 0

    def note(self, arm: Arm, running: Sequence[Group]) -> None:
        reserved, allocated = arm.taken()
        self.steps += 1
        self.running += len(running)
        self.tokens += sum(group.sequences[0].num_tokens for group in running)
        self.reserved += reserved
        self.allocated += allocated

    def row(self, num_slots: int) -> dict[str, float]:
        """Returns shares of all slots in percent: tokens; reserved without a token; lost by rounding to a chunk; and
        free. Also returns the mean number of running requests, and the numbers of preemptions and steps.
        """
        whole = self.steps * num_slots / 100
        return {
            "tokens": round(self.tokens / whole, 1),
            "reserved": round((self.reserved - self.tokens) / whole, 1),
            "rounded": round((self.allocated - self.reserved) / whole, 1),
            "free": round(100 - self.allocated / whole, 1),
            "running": round(self.running / self.steps, 2),
            "preempted": self.preempted,
            "steps": self.steps,
        }


def simulate(arm: Arm, requests: Sequence[Lens], warm: float = 0.2, compute: Compute | None = None) -> Shares:
    """Runs all requests, which wait from the beginning. Counts the steps from the time when the share `warm` of the
    requests has ended until no request is waiting. Without `compute`, no model runs, and every token is 0. Raises
    RuntimeError if memory is too small for a single request.
    """
    scheduler, shares, ended = DecodeScheduler(max_num_seqs=1 << 20, max_queue=len(requests)), Shares(), 0
    for handle, (prompt, output) in enumerate(requests):
        ids = random.Random(handle).choices(range(5, 200), k=prompt)
        tokens = Tokens(ids, [], SamplingParams(temperature=0.0), StoppingParams(max_tokens=output))
        scheduler.add(Group(handle, 0, [tokens], live=[tokens]))
    while not scheduler.idle:
        while (group := scheduler.resumable()) is not None and arm.start(group):
            scheduler.resume(group)
        scheduler.admit(arm.start)
        if not scheduler.running:
            raise RuntimeError("the memory is too small for one request")
        _reserve(scheduler, arm, shares)
        counts = ended >= warm * len(requests) and scheduler.load().num_waiting > 0
        if counts:
            shares.note(arm, scheduler.running)
        running = scheduler.running
        ended += _step(scheduler, arm, compute(running, counts) if compute is not None else [0] * len(running))
    return shares


def _reserve(scheduler: DecodeScheduler, arm: Arm, shares: Shares) -> None:
    """Makes room for the next token of every running group. Preempts the last groups if necessary."""
    for group in list(scheduler.running):
        while group in scheduler.running and not arm.grow(group):
            last = scheduler.running[-1]
            scheduler.preempt(last)
            arm.end(last)
            shares.preempted += 1


def _step(scheduler: DecodeScheduler, arm: Arm, tokens: Sequence[int]) -> int:
    """Adds its token to every running sequence. Returns the number of groups that have ended."""
    done: list[Group] = []
    for group, token in zip(scheduler.running, tokens, strict=True):
        [sequence] = group.sequences
        sequence.output_ids.append(token)
        if len(sequence.output_ids) >= sequence.stopping.max_tokens:
            done.append(group)
    for group in done:
        scheduler.remove(group)
        arm.end(group)
    return len(done)


ARMS: dict[str, Callable[[int, int], Arm]] = {
    "Orca (Max)": lambda slots, most: Contiguous("max", slots, most),
    "Orca (Pow2)": lambda slots, most: Contiguous("pow2", slots, most),
    "Orca (Oracle)": lambda slots, most: Contiguous("oracle", slots, most),
    "paged, 16": lambda slots, _: Paged(slots, 16),
}
