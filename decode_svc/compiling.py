"""Delays submitted groups, and later commands for them, while their grammars are compiled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from common.errors import InvalidArgument
from decode_svc.scheduler import Group
from worker.grammars import Grammars

logger = logging.getLogger("decode")
Command = Callable[[], None]


class Compiling:
    """A session's groups that are waiting for their grammars. The object is used in the event loop."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._later: dict[int, list[Command]] = {}
        """Commands for each waiting group, by handle."""
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, group: Group, post: Command, refuse: Command) -> None:
        """Calls `post` when the group's sequences have their grammars: at once for free text, and usually for a grammar
        that is already compiled. Calls `refuse` if the grammar cannot be used.
        """
        if self._grammars.attach_known(group.sequences):
            return post()
        self._later[group.handle] = []
        task = asyncio.create_task(self._prepare(group, post, refuse))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def after(self, handle: int, command: Command) -> None:
        """Calls `command` now or, if the group is waiting for its grammar, after `post` or `refuse`."""
        if (later := self._later.get(handle)) is None:
            command()
        else:
            later.append(command)

    def close(self) -> None:
        """Cancels all waiting groups. Their tickets expire."""
        for task in self._tasks:
            task.cancel()

    async def _prepare(self, group: Group, post: Command, refuse: Command) -> None:
        try:
            await self._grammars.prepare(group.sequences)
        except Exception as error:  # any error, because the caller is waiting for an answer
            if not isinstance(error, InvalidArgument):
                logger.exception("a grammar could not be compiled")
            refuse()
        else:
            post()
        for command in self._later.pop(group.handle, ()):  # empty if a second group had the same handle
            command()
