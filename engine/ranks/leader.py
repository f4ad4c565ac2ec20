"""The first rank of a worker. It starts the other ranks, sends them every step, and detects the loss of a rank. The
other ranks are child processes (`engine.ranks.follower`). They run forward passes over the same arena; the first rank
handles blocks, references, sampling and RPC. In addition to the sockets between ranks, each follower has a socket for
messages, and a socket on which it sends a beat twice a second. If the socket for beats closes, the other side has
ended.
"""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common.telemetry import log_format_of
from engine.errors import ModelError, RankLost
from engine.ranks.messages import Kind, Loaded, SharedBlocks, pack, receive, send, send_json
from engine.ranks.place import Place
from engine.ranks.seat import Seat
from engine.step import StepInput

logger = logging.getLogger("ranks")
BEAT_S = 0.5
SILENT_BEATS = 8
"""Number of consecutive missing beats after which a follower counts as frozen (4 s after its last beat). Missing
beats are counted instead of seconds, so that a pause of this process does not count.
"""


class Follower:
    """The first rank's handle to the process of another rank."""

    def __init__(self, rank: int, seats: Sequence[socket.socket | None], settings: Mapping[str, Any]) -> None:
        """Starts the process. `seats` are the follower's sockets to each rank (None for itself), which are closed in
        this process. `settings` are the fields of a `RunnerSettings`.
        """
        self.rank = rank
        self.weights_bytes = 0
        """Bytes of the weights that the follower has loaded."""
        self.messages, theirs = socket.socketpair()
        self._life, their_life = socket.socketpair()
        peers = [-1 if peer is None else peer.fileno() for peer in seats]
        fds = [theirs.fileno(), their_life.fileno(), *peers]
        root = logging.getLogger()
        logs = (logging.getLevelName(root.getEffectiveLevel()), log_format_of(root))
        command = [sys.executable, "-m", "engine.ranks.follower", *logs, *map(str, (rank, *fds))]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[fd for fd in fds if fd >= 0])
        for end in (theirs, their_life, *seats):
            if end is not None:
                end.close()
        send_json(self.messages, Kind.SETTINGS, {**settings, "model": str(settings["model"])})

    def loaded(self) -> Loaded:
        """Waits until the follower has loaded its share. Raises ModelError if the follower fails or ends."""
        try:
            answer = Loaded(**receive(self.messages).json)
        except (RankLost, OSError) as error:
            raise ModelError(f"rank {self.rank} {self._how_it_ended()} while it loaded the model") from error
        if answer.error:
            raise ModelError(f"rank {self.rank}: {answer.error}")
        return answer

    def watch(self) -> str:
        """Waits until the follower has ended or is frozen, and returns the reason."""
        self._life.settimeout(BEAT_S)
        silent = 0
        while silent < SILENT_BEATS:
            try:
                if not self._life.recv(64):
                    return f"rank {self.rank} {self._how_it_ended()}"
                silent = 0
            except TimeoutError:
                silent += 1
            except OSError:
                return "closed"
        return f"rank {self.rank} (process {self.process.pid}) is frozen: no beat for {silent * BEAT_S:.0f} s"

    def end(self) -> None:
        """Kills the process if it is still running, and closes the connections to it."""
        self.process.kill()
        self.process.wait()
        for own in (self.messages, self._life):
            own.close()

    def _how_it_ended(self) -> str:
        try:
            status = self.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"


class Leader(Seat):
    """The seat of the first rank, which manages the other ranks."""

    def __init__(self, place: Place, settings: Mapping[str, Any]) -> None:
        """Starts the followers, which load their share of the model while this process loads its own."""
        table: list[list[socket.socket | None]] = [[None] * place.size for _ in range(place.size)]
        for one in range(place.size):
            for other in range(one):
                table[one][other], table[other][one] = socket.socketpair()
        super().__init__(place, table[0])
        self.followers = [Follower(rank, table[rank], settings) for rank in range(1, place.size)]
        self.lost: str | None = None
        """The reason why the worker must end; None while all ranks are running."""
        self._on_lost: list[Callable[[], object]] = []
        self._is_closed = False

    def wait_loaded(self, own: Loaded) -> int:
        """Waits until every follower has loaded its share, and begins to watch them. Returns the size of their weights
        in bytes. Raises ModelError if a follower has failed, or if its numerics or model fingerprint differs from that
        of this process (`own`).
        """
        for follower in self.followers:
            answer = follower.loaded()
            for name in ("numerics", "model_fingerprint"):
                if (theirs := getattr(answer, name)) != (ours := getattr(own, name)):
                    raise ModelError(f"rank {follower.rank} has {name} {theirs!r}, but the first rank has {ours!r}")
            follower.weights_bytes = answer.weights_bytes
        for follower in self.followers:
            name = f"rank-{follower.rank}"
            threading.Thread(target=self._watch, args=(follower,), name=name, daemon=True).start()
        return sum(follower.weights_bytes for follower in self.followers)

    def on_lost(self, call: Callable[[], object]) -> None:
        """Registers a function that will be called when a rank is lost, in the thread that detects the loss."""
        self._on_lost.append(call)

    def check(self) -> None:
        """Raises RankLost if a rank is lost."""
        if self.lost is not None:
            raise RankLost(self.lost)

    def share(self, blocks: SharedBlocks) -> None:
        """Tells every follower to bind the arena of the following steps."""
        for follower in self.followers:
            send_json(follower.messages, Kind.ARENA, blocks)

    def guard(self, key: int, fd: int) -> None:
        """Makes every follower keep a file open until a file with the same key replaces it, or the follower ends. A
        writer slot therefore stays locked until no rank can write any more (docs/parallel.md).
        """
        for follower in self.followers:
            send(follower.messages, Kind.GUARD, key=key, fd=fd)

    def close(self) -> None:
        """Ends the followers."""
        self._is_closed = True
        for follower in self.followers:
            follower.end()
        for peer in self._peers:
            if peer is not None:
                peer.close()
        if self._sender is not None:
            self._sender.close()

    # --- inside

    def _announce(self, batch: StepInput, has_head: bool) -> None:
        self.check()
        body = pack(batch)
        for follower in self.followers:
            send(follower.messages, Kind.STEP, body, key=int(has_head))

    def _watch(self, follower: Follower) -> None:
        reason = follower.watch()
        if self._is_closed or self.lost is not None:
            return
        self.lost = reason
        logger.error("%s: this worker ends", reason)
        for other in self.followers:
            other.end()  # a step that waits for one of them fails
        for call in self._on_lost:
            call()
