"""The Ray actors that run a group of services on a node. They start the group again if it fails; if the actor's process
or its node is lost, Ray starts the actor again, on another node if necessary.

The services are children of the actor's process and end soon after it (`looseleaf.serve.child`).
"""

from __future__ import annotations

import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from typing import Any, Generic, TypeVar

from common.api_keys import read_keys
from common.errors import LooseleafError, StartupError
from looseleaf.cluster import ray_cluster
from looseleaf.cluster.front_group import FrontGroup
from looseleaf.cluster.host_group import HostGroup
from looseleaf.cluster.plan import HostPlan
from looseleaf.cluster.shared import Shared
from looseleaf.serve.sample import sample
from looseleaf.serve.service_group import FAILED_GRACE_S
from looseleaf.serve.supervisor import CHECK_S

G = TypeVar("G", HostGroup, FrontGroup)
RETRY_S = 5.0
"""Time in seconds until a group that failed is started again."""
_MOST_LINES = 1000


class GroupActor(ABC, Generic[G]):
    """Runs a group in a thread. The methods answer while the group starts and drains."""

    def __init__(self) -> None:
        self.address = ray_cluster.node_address()
        self._lines: deque[str] = deque(maxlen=_MOST_LINES)
        self._failure: str | None = None
        self._is_ready = False
        self._group: G | None = None
        self._ended = threading.Event()
        self._since = time.time()
        self._thread = threading.Thread(target=self._run, name="group", daemon=True)
        self._thread.start()

    @abstractmethod
    def _make(self) -> G | None:
        """Returns a new group, or None if there is nothing to run now."""

    def _check(self, group: G) -> None:
        """Is called often while the group runs. Raises an error to start the group again."""
        group.check()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self._group = group = self._make()
                if group is None:
                    self._ended.wait(CHECK_S)
                    continue
                self._serve(group)
            except (StartupError, LooseleafError) as error:
                self._fail(str(error))
            except Exception:  # shown by `looseleaf status`; the group is started again
                self._fail(traceback.format_exc())

    def _serve(self, group: G) -> None:
        grace_s: float | None = FAILED_GRACE_S
        try:
            group.start()
            self._is_ready, self._failure, self._since = True, None, time.time()
            while not self._ended.wait(CHECK_S):
                self._check(group)
            grace_s = None  # that of the settings
        finally:
            self._is_ready = False
            group.stop(grace_s)
            self._group = None

    def _fail(self, why: str) -> None:
        self._failure, self._since = why, time.time()
        self._echo(f"looseleaf: {why}; starting again after {RETRY_S:.0f} s")
        self._ended.wait(RETRY_S)

    def _echo(self, line: str) -> None:
        self._lines.append(line)
        print(line, flush=True)  # to Ray's log of the actor

    def status(self) -> dict[str, Any]:
        """Returns the group's state, its node, its services' states and process ids, and its last failure, if any."""
        group = self._group
        return {
            "state": "ready" if self._is_ready else "starting",
            "node": self.address,
            "since": self._since,
            "failure": self._failure,
            "services": {} if group is None else group.states,
            "pids": {} if group is None else group.pids,
        }

    def logs(self, most_lines: int) -> list[str]:
        """Returns the last log lines of the group's services."""
        return list(self._lines)[-most_lines:]

    def stop(self) -> None:
        """Drains and ends the group. A group that is still starting is ended at once. Returns when its processes have
        ended.
        """
        self._ended.set()
        if (group := self._group) is not None and not self._is_ready:
            group.kill()  # `start` then fails
        self._thread.join()


class HostActor(GroupActor[HostGroup]):
    """Runs the block store and the workers of one host."""

    def __init__(self, name: str, index: int, shared: Shared) -> None:
        self._shared = shared
        self._index = index
        self._name = name
        self._plan: HostPlan | None = None
        super().__init__()

    def plan(self) -> dict[str, int] | None:
        """Returns the host's plan, or None if this actor does not know it yet."""
        return None if self._plan is None else self._plan.as_dict()

    def resize(self, plan: dict[str, int]) -> None:
        """Sets the workers that the host should have. Returns at once; `status` shows how far it is."""
        self._plan = HostPlan(**plan)

    def _make(self) -> HostGroup | None:
        if self._plan is None:  # asked for, because it may have changed since Ray first created this actor
            self._plan = HostPlan(**ray_cluster.call(ray_cluster.deployment(self._name), "plan", self._index))
        if not self._plan.num_workers:
            return None
        return HostGroup(self._shared, self._plan, self.address, self._echo)

    def _check(self, group: HostGroup) -> None:
        super()._check(group)
        if self._plan is not None and self._plan != group.plan:
            group.resize(self._plan)


class FrontActor(GroupActor[FrontGroup]):
    """Runs the gateway and Redis."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        super().__init__()

    def _make(self) -> FrontGroup:
        return FrontGroup(self._shared, self.address, self._echo)

    def status(self) -> dict[str, Any]:
        group = self._group
        return super().status() | {"addresses": None if group is None else group.addresses}

    def sample(self) -> str:
        """Returns a line of text that the gateway generates. Runs here because other nodes cannot reach the gateway if
        it listens on loopback.
        """
        group, settings = self._group, self._shared.settings()
        if group is None or group.addresses is None:
            return "  says  nothing: the gateway is not ready"
        keys = read_keys(settings.api_key, settings.api_key_file)
        return sample(group.addresses[1], keys, settings.ssl_certfile)
