"""Repeats the worked example of PagedAttention (figure 6): 7 prompt tokens in blocks of 4, and two decode steps.

A real decode worker runs the built-in model over a real arena of nine blocks and a real ledger in Redis. The free list
of the ledger is brought into the order 7, 1, 3, so that blocks get the numbers of the paper. Tables come from the
worker's sequences, and written positions from the bytes of the arena. The example is run twice: by one worker, as in
the paper, and with a hand-over from a prefill worker, which seals the partial block.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bench.paper.parts import Claim, Options, Section, table
from block_store.ledger.codec import SealItem
from block_store.ledger.prefix_hash import chain_start, next_hash
from block_store.redis import redis_server
from common.types import SamplingParams, StoppingParams
from decode_svc.scheduler import Group
from engine.binding import as_tensor, layer_caches
from engine.block_table import BlockTable
from engine.model_runner import ModelRunner, RunnerSettings
from engine.sampler import SampleRow, sample_rows
from engine.sequence import Chunk, lay_out
from engine.sequence import Sequence as Tokens
from loadtest.svg import document, rect, text
from looseleaf.serve.model_source import BUILT_IN
from testing.decode import DOMAIN, Answer, DecodeBench

LIMIT_S = 30
PROMPT = "One day the dog saw a"
NUM_BLOCKS, BLOCK_SIZE = 9, 4
PAPER_ORDER = (7, 1, 3, 0, 2, 4, 5, 6, 8)
"""The order of the free list. The paper's sequence gets the first three blocks."""
PAPER_TABLES = ([7, 1], [7, 1], [7, 1, 3])
PAPER_WRITTEN = ({"7": 4, "1": 3}, {"7": 4, "1": 4}, {"7": 4, "1": 4, "3": 1})
HANDED_OVER_TABLES = ([7, 1], [7, 3], [7, 3, 1])


def measure(options: Options) -> dict[str, Any]:
    """Returns the stages of both runs. Raises AssertionError if the run of one worker differs from the paper, if the
    other run has other tables than HANDED_OVER_TABLES, or if the two runs generate different tokens.
    """
    settings = RunnerSettings(BUILT_IN, num_threads=1, max_model_len=64, device="cpu", block_size=BLOCK_SIZE)
    runner = ModelRunner(settings)
    prompt = Tokenizer.from_file(str(BUILT_IN / "tokenizer.json")).encode(PROMPT)
    assert len(prompt.ids) == 7, f"the prompt has {len(prompt.ids)} tokens, not 7"
    with tempfile.TemporaryDirectory(prefix="looseleaf-paper-") as name:
        redis = redis_server.connect(None, Path(name))
        try:
            runs = {}
            for kind in ("one worker", "with a hand-over"):
                bench = DecodeBench(runner, Path(name) / kind, redis.client, num_blocks=NUM_BLOCKS)
                runs[kind] = _run(bench, prompt.ids, hand_over=kind != "one worker")
                bench.close()
        finally:
            redis.close()
    alone, handed = runs["one worker"], runs["with a hand-over"]
    assert [stage["table"] for stage in alone] == list(PAPER_TABLES), alone
    assert [stage["written"] for stage in alone] == list(PAPER_WRITTEN), alone
    assert [stage["table"] for stage in handed] == list(HANDED_OVER_TABLES), handed
    assert [stage["token_ids"] for stage in handed] == [stage["token_ids"] for stage in alone]
    return {"words": [_word(runner, token) for token in alone[-1]["token_ids"]], "runs": runs}


def _word(runner: ModelRunner, token: int) -> str:
    tokenizer = Tokenizer.from_file(str(Path(runner.settings.model) / "tokenizer.json"))
    return tokenizer.decode([token], skip_special_tokens=False).strip()


def _run(bench: DecodeBench, prompt: Sequence[int], *, hand_over: bool) -> list[dict[str, Any]]:
    """Returns the stages: after the prompt, and after each of two decode steps."""
    bench.arena.data[:] = 0
    bench.prefill.release_many([sorted(bench.prefill.alloc(NUM_BLOCKS), key=lambda ref: PAPER_ORDER.index(ref.block))])
    sampling, stopping = SamplingParams(temperature=0.0), StoppingParams(max_tokens=4)
    if hand_over:
        group = bench.submit(0, list(prompt), sampling, stopping)
        [sequence] = group.sequences
    else:
        sequence = Tokens(list(prompt), [], sampling, stopping)
        _compute_here(bench, sequence)
    stages = [_stage(bench, sequence)]
    for _ in range(2):
        bench.worker.step()
        stages.append(_stage(bench, sequence))
    bench.run()
    return stages


def _compute_here(bench: DecodeBench, sequence: Tokens) -> None:
    """Computes the prompt in blocks of the decode worker, draws the first token, and queues the sequence. The full
    block is sealed; the partial block stays writable.
    """
    refs = bench.held.alloc(2)
    sequence.table, sequence.hashes = BlockTable(refs), [chain_start(DOMAIN, b"")]
    logits = bench.runner.step(lay_out([Chunk(sequence, sequence.num_tokens)], BLOCK_SIZE).batch)
    sequence.extend_hashes(1, BLOCK_SIZE, next_hash)
    sequence.table[0] = bench.held.seal([SealItem(refs[0], sequence.block_hash(0))])[0]
    sequence.num_computed, sequence.num_sealed = sequence.num_tokens, 1
    sequence.output_ids.append(sample_rows(logits, [SampleRow.of(sequence)])[0].token_id)
    bench.inbox.answers[0][0] = Answer(list(sequence.output_ids))
    group = Group(0, 0, [sequence], live=[sequence])
    bench.worker._outbox.open(bench.inbox.session, group)
    bench.scheduler.add(group)


def _stage(bench: DecodeBench, sequence: Tokens) -> dict[str, Any]:
    """Returns the block table, the tokens, and the number of positions in each block of the table whose keys in the
    first layer are not zero in the arena.
    """
    cache = layer_caches(as_tensor(bench.arena.data, bench.runner.device.torch_device), bench.runner.layout,
                         bench.runner.layer_groups)[0]  # fmt: skip
    written = (cache.keys != 0).any(dim=3).any(dim=1).sum(dim=1)  # [num_blocks]
    blocks = [ref.block for ref in sequence.table]
    return {
        "table": blocks,
        "written": {str(block): int(written[block]) for block in blocks},
        "token_ids": sequence.token_ids,
        "num_computed": sequence.num_computed,
    }


def section(result: Mapping[str, Any]) -> Section:
    stages, words = result["runs"]["one worker"], result["words"]
    names = ("after the prompt", "after the first decode step", "after the second decode step")
    rows = []
    for index, name in enumerate(names):
        cells = [_cell(result["runs"][kind][index]) for kind in ("one worker", "with a hand-over")]
        rows.append([name, _cell({"table": PAPER_TABLES[index], "written": PAPER_WRITTEN[index]}), *cells])
    claim = Claim(
        "7 prompt tokens in blocks of 4 take physical blocks 7 and 1; the second new token takes block 3",
        "PagedAttention, figure 6", "7, 1, then 3", ", ".join(map(str, stages[-1]["table"])),
        [stage["table"] for stage in stages] == list(PAPER_TABLES),
        "with one worker. After a hand-over, decode copies the sealed partial block first",
    )  # fmt: skip
    described = (
        f"The built-in model gets the prompt {PROMPT!r}, which has 7 tokens with the start token, and generates "
        f"{' '.join(repr(word) for word in words[7:])}. The table lists the physical blocks, with the number of "
        "positions that contain keys. The measurement fails if the column *one worker* differs from the paper.\n\n"
        + table(["stage", "paper", "one worker", "with a hand-over"], rows)
        + "\n\nThe paper's engine computes prompt and output in one worker. Here, prefill hands the blocks over to "
        "decode and seals them first, also the partial block 1. So decode copies it to block 3 before it writes the "
        "eighth position (copy-on-write), and block 1 is free for the next position. The 3 "
        "positions counted there include 2 old ones, which the table's length hides from readers. Both runs generate "
        "the same tokens."
    )
    image = draw(stages, words, names)
    return Section("The worked example: 7 tokens in blocks of 4", described, [claim], {"worked_example.svg": image})


def _cell(stage: Mapping[str, Any]) -> str:
    return ", ".join(f"{block} ({stage['written'][str(block)]})" for block in stage["table"])


def draw(stages: Sequence[Mapping[str, Any]], words: Sequence[str], names: Sequence[str]) -> str:
    """Returns a drawing of the arena at each stage, with the words in the positions of the sequence's blocks."""
    cell_w, cell_h, left, parts = 62, 22, 40, []
    for column, (stage, name) in enumerate(zip(stages, names, strict=True)):
        x0 = left + column * (4 * cell_w + 56)
        parts.append(text(x0 + 2 * cell_w, 50, f"{name}: table {stage['table']}"))
        for block in range(NUM_BLOCKS):
            y = 62 + block * (cell_h + 4)
            parts.append(text(x0 - 8, y + 15, str(block), anchor="end"))
            entry = stage["table"].index(block) if block in stage["table"] else None
            for slot in range(BLOCK_SIZE):
                filled = entry is not None and slot < stage["written"][str(block)]
                position = (entry or 0) * BLOCK_SIZE + slot
                colour = "#bee3f8" if filled else "#ebf8ff" if entry is not None else "#f7fafc"
                parts.append(rect(x0 + slot * cell_w, y, cell_w, cell_h, colour, "#a0aec0"))
                if filled:
                    parts.append(text(x0 + (slot + 0.5) * cell_w, y + 15, words[position], size=11))
    return document("Physical blocks 0 to 8 of the arena", parts, left + 3 * (4 * cell_w + 56), 310)
