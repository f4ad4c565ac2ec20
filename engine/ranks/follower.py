"""The process of a rank other than the worker's first rank (`python -m engine.ranks.follower`). It loads its share of
the model, and runs the forward passes that the first rank sends. It ends at once when the first rank closes the socket
for beats.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
import threading
from pathlib import Path

from common.errors import StartupError
from common.telemetry import configure_logging
from engine.errors import RankLost
from engine.model_runner import ModelRunner, RunnerSettings
from engine.ranks.leader import BEAT_S
from engine.ranks.messages import Kind, Loaded, SharedBlocks, receive, send_json, unpack
from engine.ranks.place import Place
from engine.ranks.seat import Seat


def main() -> None:
    level, log_format = sys.argv[1:3]
    rank, messages_fd, life_fd, *peer_fds = map(int, sys.argv[3:])
    for number in (signal.SIGINT, signal.SIGTERM):  # the first rank ends this process
        signal.signal(number, signal.SIG_IGN)
    configure_logging(level, "json" if log_format == "json" else "text", service=f"rank {rank}")
    threading.Thread(target=_beat, args=(socket.socket(fileno=life_fd),), name="beat", daemon=True).start()
    peers = [None if fd < 0 else socket.socket(fileno=fd) for fd in peer_fds]
    with contextlib.suppress(RankLost, OSError):  # the first rank has ended
        serve(socket.socket(fileno=messages_fd), rank, peers)
    os._exit(1)


def _beat(life: socket.socket) -> None:
    """Sends a beat twice a second. Ends the process when the first rank has ended."""
    with contextlib.suppress(OSError):
        while True:
            life.sendall(b".")
            if select.select([life], [], [], BEAT_S)[0]:
                break
    os._exit(1)


def serve(messages: socket.socket, rank: int, peers: list[socket.socket | None]) -> None:
    """Loads the model, and handles the messages of the first rank. Raises RankLost if the model cannot be loaded or a
    step fails, and RankLost or OSError if the first rank has ended.
    """
    runner = _load(messages, rank, peers)
    guards: dict[int, int] = {}
    bound: SharedBlocks | None = None
    gc.freeze()
    while True:
        message = receive(messages)
        if message.kind is Kind.GUARD:
            if (old := guards.pop(message.key, None)) is not None:
                os.close(old)
            [guards[message.key]] = message.fds
        elif message.kind is Kind.ARENA:
            if (blocks := SharedBlocks(**message.json)) != bound:  # both roles of a process bind the same arena
                runner.bind(blocks.map(), blocks)
                bound = blocks
        else:
            compute = runner.step if message.key else runner.hidden_states
            compute(unpack(message.body))


def _load(messages: socket.socket, rank: int, peers: list[socket.socket | None]) -> ModelRunner:
    asked = receive(messages).json
    settings = RunnerSettings(**{**asked, "model": Path(asked["model"])})
    try:
        runner = ModelRunner(settings, seat=Seat(Place.of(rank, settings), peers))
    except StartupError as error:
        send_json(messages, Kind.LOADED, Loaded(error=str(error)))
        raise RankLost(str(error)) from None
    answer = Loaded(runner.weights_bytes, runner.numerics, runner.model_fingerprint)
    send_json(messages, Kind.LOADED, answer)
    return runner


if __name__ == "__main__":
    main()
