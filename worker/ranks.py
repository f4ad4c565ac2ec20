"""The ranks of a worker at its arena: they map the same blocks, and keep the writer slot locked.

The ledger counts a writer slot as free when nobody locks its file. The lock belongs to the open file, which the first
rank therefore sends to the others: as long as one of them is alive, and may still store the keys and values of a step,
the blocks that the worker was writing stay in quarantine.
"""

from __future__ import annotations

from block_store.holder.attach import Attached
from engine.model_runner import ModelRunner
from engine.ranks.leader import Leader
from engine.ranks.messages import SharedBlocks
from worker.step_thread import StepThread


def bind_ranks(runner: ModelRunner, attached: Attached) -> None:
    """Binds the arena to all ranks of a role's runner, and lets them lock its writer slot, also after a renewal."""
    arena = attached.arena
    if not isinstance(runner.seat, Leader):
        runner.bind(arena.data)
        return
    runner.bind(arena.data, SharedBlocks(str(arena.path), arena.data_offset, *arena.data.shape))
    leader, key = runner.seat, id(attached)  # the roles of a process have a slot each

    def guard() -> None:
        leader.guard(key, attached.held.writer_slot.fileno())

    attached.on_renewed = guard  # which has a new slot
    guard()


def end_with_ranks(runner: ModelRunner, thread: StepThread) -> None:
    """Ends the role's step thread, and with it the process, when a rank is lost, also while the role is idle."""
    if isinstance(leader := runner.seat, Leader):
        leader.on_lost(lambda: thread.post(leader.check))
