"""A process that serves byte channels, and has too few descriptors or threads for a while."""

from __future__ import annotations

import socket

import pytest

from block_store.transfer.byte_channel import NONCE_BYTES
from testing.ledger.store import line, python, wait_until

SERVER = """if True:
    import resource, sys, threading, time
    from block_store.transfer import byte_server
    from common.trust import NO_TRUST
    byte_server.MAX_CONNECTIONS = 1
    server = byte_server.ByteServer("127.0.0.1", 0, NO_TRUST, lambda arena_id: None)
    print(server.listen(), flush=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if sys.argv[1] == "files":
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    else:
        threading.stack_size(1 << 60)
    print("short", flush=True)
    while not server.fallbacks.counts:
        time.sleep(0.01)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    threading.stack_size(0)
    print(*server.fallbacks.counts, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("lacking", ["files", "threads"])
def test_a_server_that_lacks_files_or_threads_for_a_while_accepts_again(lacking: str) -> None:
    process = python(SERVER, lacking)
    address = "127.0.0.1", int(line(process))
    assert line(process) == "short"
    with socket.create_connection(address, 60.0):
        assert line(process) == "byte channel not accepted"
    wait_until(lambda: len(greeting(address)) == NONCE_BYTES)
    process.communicate("end", timeout=60)


def greeting(address: tuple[str, int]) -> bytes:
    """Returns the first bytes that the server sends, or nothing if it has no place for a connection."""
    with socket.create_connection(address, 60.0) as connection:
        return connection.recv(NONCE_BYTES, socket.MSG_WAITALL)
