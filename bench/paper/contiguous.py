"""Measures the share of KV memory that contains tokens with the real engine: contiguous reservation and paging compute
the same requests over the same arena.

The contiguous arms give a sequence a block table of consecutive blocks for its whole reservation when it starts. Shares
are counted in the arena: positions whose keys are not zero. Blocks are filled with zeros when they are freed.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.paper.memory import MAX_LEN, PAPER, ROOM, lengths
from bench.paper.memory_arms import ARMS, Arm, Lens, Paged, simulate
from bench.paper.parts import Claim, Options, Section, table
from common.types import BlockRef
from decode_svc.scheduler import Group
from engine.binding import layer_caches
from engine.block_table import BlockTable
from engine.model_runner import ModelRunner, RunnerSettings
from engine.sampler import SampleRow, sample_rows
from engine.sequence import Chunk, lay_out
from engine.tiny import make_checkpoint
from loadtest.svg import Axis, bars

LIMIT_S = 80
SCALE = 4
"""Lengths, memory and block size are the paper's, divided by this number."""
NUM_SLOTS, LONGEST, BLOCK_SIZE = 3_924, MAX_LEN // SCALE, 16 // SCALE
NUM_REQUESTS, QUICK_REQUESTS = 200, 120
EVERY = 16
"""Positions are counted in one of so many steps."""


class Engine:
    """An arm whose memory is a real arena, and the runner that computes over it. Wraps an arm, which chooses the
    blocks.
    """

    def __init__(self, runner: ModelRunner, arm: Arm, num_slots: int) -> None:
        self._runner, self._arm = runner, arm
        runner.bind(runner.new_arena(num_slots // BLOCK_SIZE))
        self._keys = layer_caches(runner.bound_arena, runner.layout, runner.layer_groups)[0].keys
        self._steps = 0
        self.counted: list[int] = []
        """The number of written positions in the arena, in the steps that were counted."""
        self.outputs: defaultdict[int, list[int]] = defaultdict(list)
        """The generated tokens by request."""

    def start(self, group: Group) -> bool:
        return self._arm.start(group) and self._set_table(group)

    def grow(self, group: Group) -> bool:
        return self._arm.grow(group) and self._set_table(group)

    def _set_table(self, group: Group) -> bool:
        [sequence], blocks = group.sequences, self._arm.blocks(group, BLOCK_SIZE)
        for block in blocks[len(sequence.table) :]:
            sequence.table.append(BlockRef(block, 1))
        return True

    def end(self, group: Group) -> None:
        [sequence] = group.sequences
        self._runner.bound_arena[[ref.block for ref in sequence.table]] = 0
        sequence.table, sequence.num_computed = BlockTable(), 0
        self._arm.end(group)

    def taken(self) -> tuple[int, int]:
        return self._arm.taken()

    def blocks(self, group: Group, size: int) -> Sequence[int]:
        return self._arm.blocks(group, size)

    def compute(self, running: Sequence[Group], counts: bool) -> list[int]:
        """Computes all missing positions of the running sequences, and draws their next tokens."""
        sequences = [group.sequences[0] for group in running]
        chunks = [Chunk(sequence, sequence.num_tokens - sequence.num_computed) for sequence in sequences]
        logits = self._runner.step(lay_out(chunks, BLOCK_SIZE).batch)
        tokens = [sampled.token_id for sampled in sample_rows(logits, [SampleRow.of(s) for s in sequences])]
        for group, sequence, token in zip(running, sequences, tokens, strict=True):
            sequence.num_computed = sequence.num_tokens
            self.outputs[group.handle].append(token)
        self._steps += counts
        if counts and self._steps % EVERY == 1:
            self.counted.append(int((self._keys != 0).any(dim=3).any(dim=1).sum()))  # keys [blocks, heads, slots, dim]
            assert self.counted[-1] == sum(sequence.num_tokens for sequence in sequences)
        return tokens


def make(name: str) -> Arm:
    return Paged(NUM_SLOTS, BLOCK_SIZE) if name.startswith("paged") else ARMS[name](NUM_SLOTS, LONGEST)


def run(runner: ModelRunner, name: str, requests: Sequence[Lens]) -> tuple[dict[str, float], Any]:
    """Returns the share of written positions in percent with further figures, and the generated tokens by request."""
    engine = Engine(runner, make(name), NUM_SLOTS)
    shares = simulate(engine, requests, compute=engine.compute)
    written = 100 * sum(engine.counted) / len(engine.counted) / NUM_SLOTS
    return {**shares.row(NUM_SLOTS), "written": round(written, 1), "counted": len(engine.counted)}, engine.outputs


def measure(options: Options) -> dict[str, Any]:
    pairs = lengths(options, QUICK_REQUESTS if options.quick else NUM_REQUESTS)
    requests = [(-(-prompt // SCALE), -(-output // SCALE)) for prompt, output in pairs]
    with tempfile.TemporaryDirectory(prefix="looseleaf-paper-") as directory:
        model = make_checkpoint(Path(directory), max_position_embeddings=LONGEST)
        runner = ModelRunner(RunnerSettings(str(model), load_format="dummy", block_size=BLOCK_SIZE))
        found = {name: run(runner, name, requests) for name in ARMS}
    first, *others = (outputs for _, outputs in found.values())
    assert all(outputs == first for outputs in others), "the arms generated different tokens"
    simulated = {name: simulate(make(name), requests).row(NUM_SLOTS) for name in ARMS}
    return {
        "requests": len(requests), "tokens": sum(map(len, first.values())),
        "arms": {name: row for name, (row, _) in found.items()},
        "simulated": {name: row["tokens"] for name, row in simulated.items()},
    }  # fmt: skip


def section(result: Mapping[str, Any]) -> Section:
    arms = result["arms"]
    claims = []
    for name, theirs in PAPER.items():
        ours = arms[name]["written"]
        holds = abs(ours - theirs) <= ROOM * theirs
        why = f"lengths are drawn, and only {result['requests']} requests run" if not holds else ""
        text = f"share of KV memory that contains tokens, {name}, counted in the engine's arena"
        claims.append(Claim(text, "PagedAttention, figure 2", f"{theirs} %", f"{ours} %", holds, why))
    rows = [
        [name, f"{row['written']} %", f"{result['simulated'][name]} %", f"{PAPER[name]} %", row["running"],
         row["preempted"], row["steps"]]
        for name, row in arms.items()
    ]  # fmt: skip
    described = (
        f"The same arms as above, with the real engine: a tiny model computes {result['requests']} requests "
        f"({result['tokens']:,} tokens) over an arena of {NUM_SLOTS:,} positions. Lengths, memory and block size "
        "are a quarter of those above, so that the run is short. A contiguous arm gives a sequence a table of "
        "consecutive blocks for its whole reservation when it starts; the paged arm adds a block when a sequence needs "
        "it. The shares are counted in the arena's bytes, as positions "
        f"whose keys are not zero, in one of {EVERY} steps. The measurement fails if the count differs from the number "
        "of tokens of the running sequences, or if an arm generates other tokens than the others.\n\n"
        + table(["arm", "written positions", "simulated", "paper", "running", "preempted", "steps"], rows)
    )
    names = list(arms)
    plot = bars(
        "Share of the arena's positions that are written", Axis("% of all positions", 0, 100), names,
        {"written": [arms[name]["written"] for name in names]},
    )  # fmt: skip
    return Section("Contiguous reservation in the engine", described, claims, {"contiguous.svg": plot})
