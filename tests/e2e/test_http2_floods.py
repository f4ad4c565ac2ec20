"""HTTP/2 floods: streams that are opened and immediately reset, and endless pings (S15 of docs/security.md)."""

from __future__ import annotations

import contextlib
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from looseleaf import LLM
from testing.system import assert_nothing_held

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING = 0, 1, 3, 4, 6
END_STREAM, END_HEADERS, CANCEL = 1, 4, 8
FLOOD = 5_000
MAX_GROWTH_BYTES = 64 << 20


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def hpack(fields: dict[str, str]) -> bytes:
    """Encodes literal fields with literal names, neither indexed nor compressed (RFC 7541, 6.2.2)."""
    texts = (text.encode() for pair in fields.items() for text in pair)
    parts = [bytes([len(text)]) + text for text in texts]
    return b"".join(b"\0" + name + value for name, value in zip(parts[::2], parts[1::2], strict=True))


CALL = hpack(
    {
        ":method": "POST", ":scheme": "http", ":path": "/looseleaf.v1.InferenceService/Generate", ":authority": "x",
        "content-type": "application/grpc", "te": "trailers",
    }
)  # fmt: skip


def opened_and_reset(number: int) -> bytes:
    stream = 2 * number + 1
    return frame(HEADERS, END_HEADERS, stream, CALL) + frame(RST_STREAM, 0, stream, struct.pack(">I", CANCEL))


def pinged(number: int) -> bytes:
    return frame(PING, 0, 0, struct.pack(">Q", number))


def flood(address: str, attack: Callable[[int], bytes]) -> int:
    """Sends FLOOD attacks, and opens a new connection whenever the server closes one. Returns the number of
    connections."""
    host, port = address.rsplit(":", 1)
    sent = connections = 0
    while sent < FLOOD:
        connections += 1
        with socket.create_connection((host, int(port)), timeout=120) as raw, contextlib.suppress(OSError):
            threading.Thread(target=swallow, args=(raw,), daemon=True).start()
            raw.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))
            for number in range(FLOOD - sent):
                raw.sendall(attack(number))
                sent += 1
            time.sleep(0.5)  # the server reads all data before the connection ends
    return connections


def swallow(raw: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while raw.recv(65536):
            pass


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), num_blocks=256, max_model_len=512) as running:
        yield running


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_stream_that_is_not_reset_is_answered(llm: LLM) -> None:
    """Shows that the server accepts the frames of this file. Otherwise the floods would prove nothing."""
    host, port = llm.addresses.grpc.rsplit(":", 1)
    empty_message = frame(DATA, END_STREAM, 1, bytes(5))
    with socket.create_connection((host, int(port)), timeout=120) as raw:
        raw.sendall(PREFACE + frame(SETTINGS, 0, 0, b"") + frame(HEADERS, END_HEADERS, 1, CALL) + empty_message)
        stream = raw.makefile("rb")
        kinds = []
        while (HEADERS, 1) not in kinds:
            head = stream.read(9)
            kinds.append((head[3], int.from_bytes(head[5:], "big")))
            stream.read(int.from_bytes(head[:3], "big"))


@pytest.mark.parametrize("attack", [opened_and_reset, pinged])
def test_others_are_served_and_nothing_grows(llm: LLM, attack: Callable[[int], bytes]) -> None:
    prompt = list(range(20, 60))
    right = llm.client.generate(prompt, max_tokens=8, ignore_eos=True, temperature=0.0).token_ids
    before, pids = resident(llm.pids["gateway"]), dict(llm.pids)
    attacker = threading.Thread(target=flood, args=(llm.addresses.grpc, attack))
    attacker.start()
    num_served = 0
    while attacker.is_alive() or not num_served:
        again = llm.client.generate(prompt, max_tokens=8, ignore_eos=True, temperature=0.0, timeout=120.0)
        assert again.token_ids == right
        num_served += 1
    attacker.join()
    assert llm.pids == pids and resident(pids["gateway"]) - before < MAX_GROWTH_BYTES
    assert_nothing_held(llm.addresses.block_store)
