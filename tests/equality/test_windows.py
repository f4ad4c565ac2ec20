"""A sequence holds no more blocks than its window needs, at every step and at realistic lengths."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.types import KvLayout, SamplingParams, StoppingParams
from engine.model_runner import ModelRunner, RunnerSettings
from engine.sequence import Chunk, Sequence
from engine.tiny import make_checkpoint
from prefill_svc import worker
from prefill_svc.group_blocks import GroupBlocks
from prefill_svc.job import Job
from prefill_svc.scheduler import PrefillScheduler
from testing.equality.cases import Case, differences, expect, make_cases
from testing.equality.workers import Workers, need_of
from testing.oracle import Oracle
from testing.zoo import ZOO, make_foreign

BUDGET, NEW_TOKENS = 512, 40
GREEDY = SamplingParams(temperature=0.0, logprobs=1)


class Watched(Workers):
    """Workers whose blocks are counted after every step."""

    def watch(self) -> None:
        self.most_held = 0
        """The largest number of blocks that a sequence held in a KV group with a window during decode."""
        self.most_in_prefill = 0
        """The largest number of blocks that a sequence held in such a group during prefill."""

    def look(self) -> None:
        layout: KvLayout = self.runner.layout
        decoding = [s for group in self.decode._scheduler.groups() for s in group.live]
        prefilling = [s for running in self.prefill._scheduler._running for s in running.job.sequences]
        self.most_held = max([self.most_held, *(n for s in decoding for n in in_windows(s, layout))])
        self.most_in_prefill = max([self.most_in_prefill, *(n for s in prefilling for n in in_windows(s, layout))])


def in_windows(sequence: Sequence, layout: KvLayout) -> list[int]:
    return [len(t.live) for t, spec in zip(sequence.tables, layout.groups, strict=True) if spec.retention.slides]


def model_of(kind: str, window: int, length: int, directory: Path) -> ModelRunner:
    changes: dict[str, Any] = {"sliding_window": window, "max_position_embeddings": length}
    if kind == "mistral":
        make_checkpoint(directory, "mistral", seed=4, dtype=torch.bfloat16, **changes)
    else:
        animal = ZOO[kind]
        make_foreign(directory, replace(animal, changes=animal.changes | changes), seed=4, dtype=torch.bfloat16)
    return ModelRunner(RunnerSettings(directory, num_threads=2, max_model_len=length, block_size=16, device="cpu"))


@pytest.mark.parametrize(
    ("kind", "window", "length", "most"),
    [("mistral", 32, 4096, 4), ("gemma3", 32, 1536, 4), ("mistral", 1024, 32768, 66)],
)
def test_only_what_a_window_reads_is_held(
    redis_client: Any, tmp_path: Path, kind: str, window: int, length: int, most: int
) -> None:
    runner = model_of(kind, window, length, tmp_path / "model")
    size = runner.layout.block_size
    prompt = tuple(torch.randint(10, 500, (length - NEW_TOKENS,), generator=torch.Generator().manual_seed(5)).tolist())
    case = Case("long", prompt, GREEDY, StoppingParams(NEW_TOKENS, NEW_TOKENS))
    least = need_of(case).blocks(runner.layout.rules(BUDGET))
    workers = Watched(runner, tmp_path / "arena", redis_client, num_blocks=least, budget=BUDGET)
    workers.watch()
    work = workers.prefill.work
    workers.prefill.work = lambda: (work(), workers.look())[0]  # type: ignore[method-assign]

    expected = expect(Oracle(runner), case)
    for cached in (0, len(prompt) // size * size - (size if len(prompt) % size == 0 else 0)):
        [asked] = workers.answer([case], before_step=Watched.look)  # type: ignore[arg-type]
        assert not (wrong := differences([case], [expected], [asked.answer])), wrong
        assert asked.cached_tokens == cached, "what was released is found again"
    assert 2 <= workers.most_held <= most
    assert least == workers.decode.load.total_blocks <= {"mistral": 1, "gemma3": 2}[kind] * length // size + BUDGET
    assert 2 <= workers.most_in_prefill <= most + BUDGET // size
    workers.assert_idle()
    workers.close()


@pytest.mark.parametrize("kind", ["gemma3", "bamba"])
def test_prompts_that_lack_blocks_midway_wait_or_start_over(
    redis_client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """In two of three steps, there are no free blocks for prompts that need blocks for their next chunk. Two such steps
    in a row count as a deadlock.
    """
    make_foreign(tmp_path / "model", ZOO[kind], seed=4, dtype=torch.bfloat16)
    settings: dict[str, Any] = {"max_model_len": 256, "block_size": 16, "device": "cpu"}
    runner = ModelRunner(RunnerSettings(tmp_path / "model", **settings))
    cases, oracle = make_cases(runner.config.vocab_size, lens=(37, 70)), Oracle(runner)
    expected = [expect(oracle, case) for case in cases]
    workers = Workers(runner, tmp_path / "arena", redis_client, budget=96)
    grow, give_way, gone = GroupBlocks.grow, PrefillScheduler.give_way, list[Job | None]()

    def scarce(blocks: GroupBlocks, chunk: Chunk) -> bool:
        lacks = any(len(table) * 16 < chunk.end for table in chunk.sequence.tables)
        if lacks and workers.num_steps % 3 > 0:
            blocks.is_short = True
            return False
        return grow(blocks, chunk)

    def counted(scheduler: PrefillScheduler, *, even_alone: bool) -> Job | None:
        gone.append(job := give_way(scheduler, even_alone=even_alone))
        return job

    monkeypatch.setattr(worker, "MAX_STUCK", 1)
    monkeypatch.setattr(GroupBlocks, "grow", scarce)
    monkeypatch.setattr(PrefillScheduler, "give_way", counted)
    for _ in ("cold", "cached"):
        found = [asked.answer for asked in workers.answer(cases)]
        assert not (wrong := differences(cases, expected, found)), wrong
    assert any(gone) and None in gone, "some waited, and some started over"
    workers.assert_idle()
    workers.close()
