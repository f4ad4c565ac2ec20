"""Connects the ranks of a worker to its arena, so that they map the same blocks and keep the writer slot locked.

A writer slot is free when no process locks its file. The lock belongs to the open file, which rank 0 sends to the
others. If rank 0 dies, the blocks that the worker was writing therefore stay in quarantine as long as another rank is
alive and may store keys and values.
"""

from __future__ import annotations

from block_store.holder.attach import Attached
from engine.model_runner import ModelRunner
from engine.ranks.leader import Leader
from engine.ranks.messages import SharedBlocks
from worker.step_thread import StepThread


def bind_ranks(runner: ModelRunner, attached: Attached) -> None:
    """Binds the arena to all ranks of a role's runner, and makes them keep the role's writer slot locked."""
    arena = attached.arena
    if not isinstance(runner.seat, Leader):
        runner.bind(arena.data)
        return
    runner.bind(arena.data, SharedBlocks(str(arena.path), arena.data_offset, *arena.data.shape))
    leader, key = runner.seat, id(attached)  # each role of a process has a slot

    def guard() -> None:
        leader.guard(key, attached.held.writer_slot.fileno())

    attached.on_renewed = guard  # a renewal takes a new slot
    guard()


def end_with_ranks(runner: ModelRunner, thread: StepThread) -> None:
    """Makes the role's step thread, and therefore the process, end when a rank is lost, even while the role is idle."""
    if isinstance(leader := runner.seat, Leader):
        leader.on_lost(lambda: thread.post(leader.check))
