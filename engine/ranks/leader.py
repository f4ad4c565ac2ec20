"""The first rank of a worker: starts the others, sends them every step, and notices the loss of one.

The other ranks are child processes (`engine.ranks.follower`). They only run forward passes over the same arena; blocks,
references, sampling and RPC are this process's. Each follower has two more sockets than the ones between ranks: one for
messages, and one on which it sends a beat twice a second, and whose end tells either side that the other is gone.
"""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.errors import ModelError, RankLost
from engine.ranks.messages import Kind, Loaded, SharedBlocks, pack, receive, send, send_json
from engine.ranks.seat import Seat
from engine.ranks.shard import Shard
from engine.step import StepInput

logger = logging.getLogger("ranks")
BEAT_S = 0.5
SILENT_BEATS = 8
"""A follower counts as frozen when this many beats in a row are missing: after 4 to 4.5 s. Beats are counted, not
seconds, so that a pause of this process is not taken for one of the follower. A step may take as long as it likes.
"""


class Follower:
    """The process of another rank, as the first rank sees it."""

    def __init__(self, rank: int, seats: Sequence[socket.socket | None], settings: Mapping[str, Any]) -> None:
        """`seats`: the follower's socket to each rank, None at its own place. They are closed here. `settings`: the
        fields of a `RunnerSettings`.
        """
        self.rank = rank
        self.messages, theirs = socket.socketpair()
        self._life, their_life = socket.socketpair()
        peers = [-1 if peer is None else peer.fileno() for peer in seats]
        fds = [theirs.fileno(), their_life.fileno(), *peers]
        level = logging.getLevelName(logging.getLogger().getEffectiveLevel())
        command = [sys.executable, "-m", "engine.ranks.follower", level, *map(str, (rank, *fds))]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[fd for fd in fds if fd >= 0])
        for end in (theirs, their_life, *seats):
            if end is not None:
                end.close()
        send_json(self.messages, Kind.SETTINGS, {**settings, "model": str(settings["model"])})

    def loaded(self) -> Loaded:
        """Waits for the follower's answer. Raises ModelError, also if it ends without one."""
        try:
            answer = Loaded(**receive(self.messages).json)
        except (RankLost, OSError) as error:
            raise ModelError(f"rank {self.rank} {self._how_it_ended()} while it loaded the model") from error
        if answer.error:
            raise ModelError(f"rank {self.rank}: {answer.error}")
        return answer

    def watch(self) -> str:
        """Returns the reason when the follower has ended or is frozen."""
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
        """Kills the process, if it is still there. Its connections to the other ranks end."""
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
    """The place of the first rank, and the other ranks."""

    def __init__(self, shard: Shard, settings: Mapping[str, Any]) -> None:
        """Starts the followers, which load their share of the model while this process loads its own."""
        table: list[list[socket.socket | None]] = [[None] * shard.size for _ in range(shard.size)]
        for one in range(shard.size):
            for other in range(one):
                table[one][other], table[other][one] = socket.socketpair()
        super().__init__(shard, table[0])
        self.followers = [Follower(rank, table[rank], settings) for rank in range(1, shard.size)]
        self.lost: str | None = None
        """Why the worker must end; None while all ranks are there."""
        self._on_lost: list[Callable[[], object]] = []
        self._is_closed = False

    def wait_loaded(self, own: Loaded) -> int:
        """Waits until every follower has loaded its share, and begins to watch them. Returns their weights' bytes.

        Raises ModelError if one has failed, or computes with other kernels or weights than this process (`own`).
        """
        total = 0
        for follower in self.followers:
            answer = follower.loaded()
            for name in ("numerics", "model_fingerprint"):
                if (theirs := getattr(answer, name)) != (ours := getattr(own, name)):
                    raise ModelError(f"rank {follower.rank} has {name} {theirs!r}, the first rank has {ours!r}")
            total += answer.weights_bytes
        for follower in self.followers:
            name = f"rank-{follower.rank}"
            threading.Thread(target=self._watch, args=(follower,), name=name, daemon=True).start()
        return total

    def on_lost(self, call: Callable[[], object]) -> None:
        """Calls `call`, in any thread, when a rank is lost."""
        self._on_lost.append(call)

    def check(self) -> None:
        """Raises RankLost if a rank is lost."""
        if self.lost is not None:
            raise RankLost(self.lost)

    def share(self, blocks: SharedBlocks) -> None:
        """Makes every follower bind the arena of the following steps."""
        for follower in self.followers:
            send_json(follower.messages, Kind.ARENA, blocks)

    def guard(self, key: int, fd: int) -> None:
        """Makes every follower keep an open file until another one with the same key replaces it, or until it ends.
        This is how a writer slot stays locked until no rank can write any more (docs/parallel.md).
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
