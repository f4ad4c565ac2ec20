"""Parses the replies of the ledger's scripts. Refusals and damaged replies become exceptions."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

import redis

from block_store import errors
from block_store.ledger import codec
from common.ticket import TicketId
from common.types import BlockRef, Epoch


class Standing(Enum):
    """The outcome of asserting a reference in a rebuilt ledger."""

    SEALED = "S"
    UNSEALED = "R"
    LOST = "L"


@dataclass(frozen=True, slots=True)
class ReapReport:
    """The result of one sweep."""

    reaped: tuple[Epoch, ...]
    num_unquarantined: int
    postponed: bool
    """Whether leases were renewed and no holder was reaped, because the last sweep was too long ago or is in the
    future.
    """
    waiting_slots: tuple[int, ...]
    """Writer slots for which blocks are in quarantine, or whose holders have yet to assert their blocks after a
    rebuild.
    """
    more: bool
    """Whether another sweep is needed, because blocks remain to be freed or released, or because holders remain to be
    ended.
    """
    tick: int
    """The ledger's tick, to pass to the next sweep."""


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Returns a context for parsing a reply. It turns the errors of parsing, and error replies of Redis, into
    LedgerDamaged. `what` names the call.
    """
    try:
        yield
    except (ValueError, TypeError, IndexError, OverflowError, struct.error, redis.ResponseError) as error:
        raise errors.LedgerDamaged(f"{what}: the data in Redis cannot be read: {error}") from error


def unpack_beat(reply: bytes) -> tuple[int, str]:
    room, census = reply.decode().split(" ")
    return int(room), census


def unpack_marks(reply: bytes, num_marks: int) -> list[bool]:
    if len(reply) != num_marks or reply.strip(b"01"):
        raise ValueError(f"{reply!r} is not {num_marks} marks")
    return [mark == ord("1") for mark in reply]


def unpack_ticket(reply: bytes) -> TicketId:
    epoch, _, secret = reply.partition(b" ")
    return TicketId(Epoch(int(epoch)), secret)


def unpack_delivered(reply: bytes, num_refs: int, secret_bytes: int) -> tuple[TicketId, list[BlockRef]]:
    epoch, _, rest = reply.partition(b" ")
    return TicketId(Epoch(int(epoch)), rest[:secret_bytes]), codec.unpack_refs(rest[secret_bytes:], num_refs)


def unpack_claimed(reply: bytes) -> tuple[list[BlockRef], bool]:
    return codec.unpack_refs(reply[1:]), reply[:1] == b"1"


def unpack_standings(reply: bytes) -> list[Standing]:
    return [Standing(letter) for letter in reply.decode()]


def unpack_holdings(reply: bytes) -> tuple[list[BlockRef], int]:
    return codec.unpack_refs(reply[8:]), int.from_bytes(reply[:8], "little")


def unpack_reaped(reply: bytes) -> ReapReport:
    reaped, freed, postponed, more, now, waiting = reply.decode().split(" ")
    epochs = tuple(Epoch(int(epoch)) for epoch in reaped.split(",") if epoch)
    slots = tuple(sorted(int(float(slot)) for slot in waiting.split(",") if slot))
    if slots and not 0 <= slots[0] <= slots[-1] < 1 << 32:
        raise ValueError(f"{slots} are not writer slots")
    return ReapReport(epochs, int(freed), postponed == "1", slots, more == "1", int(now))


def refusal(reply: bytes) -> errors.LedgerError:
    """Returns the exception for a refusal, whose form is '-CODE detail..'."""
    code, *detail = reply[1:].decode().split(" ")
    match code:
        case "EXHAUSTED":
            return errors.Exhausted(int(detail[0]), int(detail[1]))
        case "FLOORS_EXCEED_ARENA":
            return errors.FloorsExceedArena(int(detail[0]), int(detail[1]))
        case "FENCED":
            return errors.Fenced("the holder was reaped")
        case "STALE":
            return errors.Stale(f"block {detail[0]} has a different generation or state")
        case "NOT_HOLDER":
            return errors.NotHolder(f"block {detail[0]} is not held")
        case "GONE":
            return errors.Gone("the ticket was claimed or has expired")
        case "STALE_DATASET":
            return errors.StaleDataset("the ledger was rebuilt")
        case _:
            return errors.OutOfOrder("the call's number is below the holder's last one")
