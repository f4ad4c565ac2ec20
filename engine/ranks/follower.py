"""`python -m engine.ranks.follower`: a rank of a worker other than the first. It loads its share of the model, and runs
the forward passes that the first rank sends.

It ends with the first rank: at once, whatever it is doing, when the connection of the beats is closed.
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
from engine.ranks.seat import Seat
from engine.ranks.shard import Shard


def main() -> None:
    rank, messages_fd, life_fd, *peer_fds = map(int, sys.argv[2:])
    for number in (signal.SIGINT, signal.SIGTERM):  # the first rank decides when it is time
        signal.signal(number, signal.SIG_IGN)
    configure_logging(sys.argv[1])
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
    """Loads the model, and follows messages until the first rank ends. Raises RankLost or OSError then."""
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
        shard = Shard.of(rank, settings.tensor_parallel_size, settings.reduction_parts)
        runner = ModelRunner(settings, seat=Seat(shard, peers))
    except StartupError as error:
        send_json(messages, Kind.LOADED, Loaded(error=str(error)))
        raise RankLost(str(error)) from None
    answer = Loaded(runner.weights_bytes, runner.numerics, runner.model_fingerprint)
    send_json(messages, Kind.LOADED, answer)
    return runner


if __name__ == "__main__":
    main()
