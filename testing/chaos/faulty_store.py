"""A block store whose byte channels become slow, or change a bit, on command. The program takes the flags of
`python -m block_store`.

The variable LOOSELEAF_CHAOS_NOTES names a directory. While it contains the file `pace`, each channel sends blocks at
most at the rate in this file, in bytes per second. If it contains the file `flip`, the store changes one bit of the
next block that it sends, and removes the file. Pieces of less than SLICE_BYTES, such as headers, are sent unchanged and
without delay.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from block_store.__main__ import main
from block_store.settings import BlockStoreSettings
from block_store.transfer import byte_server
from block_store.transfer.byte_channel import Buffer, send
from common.service_main import run_service
from testing.two_hosts import NOTES

PACE, FLIP = "pace", "flip"
SLICE_BYTES = 2048


def install(notes: Path) -> None:
    """Makes the byte channels of this process apply the faults for which `notes` contains files."""

    def faulty(connection: socket.socket, pieces: Iterable[Buffer]) -> None:
        for piece in pieces:
            for part in _slices(_flipped(notes / FLIP, piece), notes / PACE):
                send(connection, [part])

    byte_server.send = faulty  # type: ignore[attr-defined]


def _slices(piece: Buffer, pace: Path) -> Iterator[Buffer]:
    """Yields the whole piece or, if the file `pace` exists and the piece has at least SLICE_BYTES, its parts, each
    after a pause.
    """
    if len(piece) < SLICE_BYTES or not pace.exists():
        yield piece
        return
    for first in range(0, len(piece), SLICE_BYTES):
        with suppress(FileNotFoundError):
            time.sleep(SLICE_BYTES / float(pace.read_text()))
        yield piece[first : first + SLICE_BYTES]


def _flipped(note: Path, piece: Buffer) -> Buffer:
    """Returns the piece or, if the file `note` exists and the piece has at least SLICE_BYTES, a copy with one bit
    changed. In the latter case, removes the file.
    """
    if len(piece) < SLICE_BYTES or not note.exists():
        return piece
    note.unlink(missing_ok=True)
    changed = bytearray(piece)
    changed[len(changed) // 2] ^= 1
    return bytes(changed)


if __name__ == "__main__":
    install(Path(os.environ[NOTES]))
    run_service("block_store", BlockStoreSettings, main)
