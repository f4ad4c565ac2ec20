"""Sending and receiving of many pieces over a real socket."""

from __future__ import annotations

import itertools
import random
import socket
import threading

import pytest

from block_store.transfer.byte_channel import MAX_PIECES, READ_AHEAD, Receiver, send


def cut(data: bytes, rng: random.Random) -> list[memoryview]:
    """Cuts data into more pieces than a system call takes. Some of them are empty, and some exceed the buffers of the
    sockets.
    """
    places = sorted([rng.randrange(len(data)) for _ in range(3 * MAX_PIECES)] + [0, 0, len(data)])
    return [memoryview(data)[first:last] for first, last in itertools.pairwise(places)]


@pytest.mark.parametrize("seed", range(5))
def test_pieces_arrive_in_order_however_they_are_cut(seed: int) -> None:
    rng = random.Random(seed)
    data = rng.randbytes(1 << 20)
    into = bytearray(len(data))
    sender, receiver = socket.socketpair()
    with sender, receiver:
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        for end in (sender, receiver):
            end.settimeout(10)  # such a socket sends only what its buffer takes
        thread = threading.Thread(target=send, args=(sender, cut(data, rng)))
        thread.start()
        channel, view = Receiver(receiver), memoryview(into)
        taken = rng.choice([1, 100, 3 * READ_AHEAD])
        into[:taken] = channel.take(taken)
        places = sorted([rng.randrange(taken, len(into)) for _ in range(2 * MAX_PIECES)] + [taken, len(into) - 9])
        channel.fill(*(view[first:last] for first, last in itertools.pairwise(places)))
        into[places[-1] :] = channel.take(len(into) - places[-1])
        thread.join()
    assert into == data


def test_an_end_that_closes_early_is_an_error() -> None:
    sender, receiver = socket.socketpair()
    with receiver:
        with sender:
            send(sender, [b"ab", b"c"])
        with pytest.raises(ConnectionResetError):
            Receiver(receiver).fill(memoryview(bytearray(2)), memoryview(bytearray(2)))
