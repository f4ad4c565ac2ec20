"""A minimal HTTP/1.1 client for load tests, which uses little of the serving machine's CPU time. It sends a POST, and
returns the status and the times at which the head, the first chunk of the body and the end arrive.

A connection carries one request at a time and is kept for the next one.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

_HEAD_LIMIT = 1 << 16


@dataclass(slots=True)
class Reply:
    """A response and its times, in seconds since the request was sent."""

    status: int
    retry_after: str | None
    head_s: float
    """The arrival of the status line and the headers."""
    first_s: float
    """The arrival of the first chunk of the body or, if the body is not chunked, of its end."""
    whole_s: float


class Connection:
    """A connection to a server, which carries one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, address: str) -> Connection:
        host, _, port = address.rpartition(":")
        return cls(*await asyncio.open_connection(host, int(port), limit=_HEAD_LIMIT))

    async def post(self, path: str, body: bytes) -> Reply:
        """Sends a POST. Raises OSError or asyncio.IncompleteReadError if the connection is lost."""
        started = time.perf_counter()
        head = f"POST {path} HTTP/1.1\r\nhost: load\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        self._writer.write(head.encode() + b"\r\n\r\n" + body)
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        head_s = time.perf_counter() - started
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        first_s = await self._read_body(headers, started)
        status = int(lines[0].split(" ", 2)[1])
        return Reply(status, headers.get("retry-after"), head_s, first_s, time.perf_counter() - started)

    async def _read_body(self, headers: dict[str, str], started: float) -> float:
        """Reads the body. Returns the time in seconds from `started` until its first chunk or, if the body is not
        chunked, its end had arrived.
        """
        if headers.get("transfer-encoding") != "chunked":
            await self._reader.readexactly(int(headers.get("content-length", "0")))
            return time.perf_counter() - started
        first_s = 0.0
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            await self._reader.readexactly(size + 2)
            first_s = first_s or time.perf_counter() - started
        await self._reader.readexactly(2)
        return first_s

    def close(self) -> None:
        self._writer.close()


class Pool:
    """A pool of connections to one address."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._idle: list[Connection] = []

    async def post(self, path: str, body: bytes) -> Reply:
        connection = self._idle.pop() if self._idle else await Connection.open(self._address)
        try:
            reply = await connection.post(path, body)
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        return reply

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
