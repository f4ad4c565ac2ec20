"""A complete answer that its client does not read counts as running, and is discarded after a time limit."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from gateway.api import http_app
from tests.gateway.http_served import Served, serve
from tests.gateway.test_requests import until

__all__ = ["serve"]
BODY = {"prompt": [[20] * 400] * 20, "max_tokens": 1, "prompt_logprobs": 20}
"""A body whose answer has some 10 MB, more than the buffers of a connection."""


async def ask(served: Served) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Sends a request, and returns a connection that receives no more than the reader reads."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(
        client, ("127.0.0.1", served.server.servers[0].sockets[0].getsockname()[1])
    )
    reader, writer = await asyncio.open_connection(sock=client, limit=4096)
    content = json.dumps(BODY).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(content), content))
    return reader, writer


async def length_of(reader: asyncio.StreamReader) -> int:
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    return int(head.lower().split(b"content-length: ")[1].split()[0])


@pytest.mark.parametrize("reads", [True, False])
async def test_an_unread_answer_counts_until_it_is_read_or_discarded(
    serve: Any,
    monkeypatch: pytest.MonkeyPatch,
    reads: bool,
) -> None:
    monkeypatch.setattr(http_app, "STALLED_CLIENT_S", 40.0 if reads else -15.0)  # besides the 20 s of a request
    served = await serve()
    reader, writer = await ask(served)
    length = await length_of(reader)
    await asyncio.sleep(1.0)
    assert served.rig.admission.num_requests == 1
    if reads:
        assert len(await reader.readexactly(length)) == length
    await until(lambda: served.rig.admission.num_requests == 0)
    if not reads:
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await reader.readexactly(length)
    writer.close()
