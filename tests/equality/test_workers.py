"""Workers in this process give the oracle's answers in bf16, for every family, every kind of request and every path.
The paths are one chunk, several chunks, cached prefixes, swapping, give-back, and a decode worker that is killed
midway. Every request has log-probabilities, and all run together, so that greedy, sampled, forked and beam rows are in
the same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from common.kv_retention import Retention
from common.types import KvKind, KvSpec
from decode_svc import swap
from decode_svc.copy_on_write import CopyOnWrite
from engine.block_table import BlockTable
from engine.config import ARCHITECTURES
from engine.model_runner import ModelRunner, RunnerSettings
from engine.tiny import make_checkpoint
from testing.equality.cases import KINDS, Answer, Case, Text, differences, expect, make_cases
from testing.equality.workers import Workers
from testing.oracle import Oracle
from testing.quantized import FORMATS, make_quantized
from testing.zoo import ZOO, make_foreign
from worker import cached_prefix, sealing

STATEFUL = ("mamba2", "bamba", "qwen3-next")
"""A model with states only, and two models with states and attention."""
FOREIGN = (
    "deepseek-v3", "gemma2", "gemma3", "glm4", "gpt-oss", "mixtral", "phi3", "qwen3-moe", *STATEFUL
)  # fmt: skip
"""Families defined by transformers, with which `tests/engine/test_foreign.py` compares their logits."""
QUANTIZED = ("qwen3-awq", "llama-int8", "gemma3-int4")
"""A 4-bit checkpoint, and weights rounded at load of a native model and of a model defined by transformers."""
INT8_CACHE = "gemma2-int8kv"
"""A model with keys and values of 8 bits, in layers with full attention and with windows."""
FAMILIES = (*ARCHITECTURES.values(), *FOREIGN, *QUANTIZED, INT8_CACHE)
TIGHT = 23
"""The number of blocks for each KV group, fewer than the requests need together. The largest group needs 15."""


@dataclass
class Subject:
    """A model and its expected answers."""

    runner: ModelRunner
    cases: list[Case]
    expected: list[Answer]

    def check(self, found: list[Answer]) -> None:
        assert not (wrong := differences(self.cases, self.expected, found)), "\n".join(wrong)


@pytest.fixture(scope="module")
def subject_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Subject]:
    """Returns a function that returns the subject of a family, which is created only once."""

    @cache
    def make(family: Any) -> Subject:
        directory = tmp_path_factory.mktemp(family)
        how: dict[str, Any] = {"seed": FAMILIES.index(family), "dtype": torch.bfloat16}
        derived = family in (*QUANTIZED, INT8_CACHE)
        base, _, quantization = str(family).partition("-") if derived else (family, "", None)
        if quantization == "awq":
            make_quantized(directory, directory / "twin", FORMATS["awq"], base, seed=3)
        elif base in ZOO:
            make_foreign(directory, ZOO[base], **how)
        else:
            make_checkpoint(directory, base, **how)
        rounded: Any = quantization if quantization in ("int8", "int4") else None
        settings = RunnerSettings(
            directory, num_threads=1, max_model_len=256, device="cpu", quantization=rounded, block_size=16,
            kv_cache_dtype="int8" if family == INT8_CACHE else "auto",
        )  # fmt: skip
        runner = ModelRunner(settings)
        assert runner.dtype == "bfloat16"
        cases, oracle = make_cases(runner.config.vocab_size), Oracle(runner)
        return Subject(runner, cases, [expect(oracle, case) for case in cases])

    return make


@pytest.fixture(scope="module", params=FAMILIES)
def subject(request: pytest.FixtureRequest, subject_of: Callable[[Any], Subject]) -> Subject:
    return subject_of(request.param)


@pytest.fixture
def llama(subject_of: Callable[[Any], Subject]) -> Subject:
    return subject_of("llama")


Make = Callable[..., Workers]


@pytest.fixture
def make_workers(redis_client: Any, tmp_path: Path) -> Iterator[Make]:
    made: list[Workers] = []

    def make(subject: Subject, **settings: Any) -> Workers:
        made.append(Workers(subject.runner, tmp_path / str(len(made)), redis_client, **settings))
        return made[-1]

    yield make
    for workers in made:
        workers.close()


def test_the_requests_are_worth_comparing(subject: Subject) -> None:
    """The answers include different samples, early ends and ends at the limit, with samples and with beams."""
    by_kind = {
        kind: [e for c, e in zip(subject.cases, subject.expected, strict=True) if c.name.startswith(kind)]
        for kind in KINDS
    }
    for answer in by_kind["n=4"] + by_kind["beam 4"]:
        assert len({tuple(text.token_ids) for text in answer}) == 4
    reasons = {text.finish_reason for answer in subject.expected for text in answer}
    assert len(reasons) == 2
    for four, one in zip(by_kind["n=4"], by_kind["n=1 of them"], strict=True):
        assert not differences(subject.cases[:1], [four[:1]], [one]), "sample 0 is what n = 1 gives"


@pytest.mark.parametrize("budget", [16, 64, 512])
def test_handed_over_cold_and_cached(subject: Subject, make_workers: Make, budget: int) -> None:
    workers = make_workers(subject, budget=budget)
    subject.check([asked.answer for asked in workers.answer(subject.cases)])
    again = workers.answer(subject.cases)
    subject.check([asked.answer for asked in again])
    assert all(asked.cached_tokens >= 16 for asked in again)
    assert not workers.rejections, "nothing was lost that a retry had to hide"
    workers.assert_idle()


def test_preempted_by_swap(subject: Subject, make_workers: Make) -> None:
    workers = make_workers(subject, num_blocks=TIGHT * len(subject.runner.layout.groups), preemption="swap")
    subject.check([asked.answer for asked in workers.answer(subject.cases)])
    counts = workers.preemption.counts
    assert counts.swapped_groups == counts.resumed_groups > 0 and counts.given_back_groups == 0
    assert not workers.rejections
    workers.assert_idle()


def test_preempted_and_given_back(subject: Subject, make_workers: Make) -> None:
    workers = make_workers(subject, num_blocks=TIGHT * len(subject.runner.layout.groups))
    subject.check([asked.answer for asked in workers.answer(subject.cases)])
    assert workers.preemption.counts.given_back_groups > 0
    workers.assert_idle()


def test_decode_killed_midway(subject: Subject, make_workers: Make) -> None:
    workers = make_workers(subject)

    def kill(them: Workers) -> None:
        if them.num_steps in (9, 20):
            them.kill_decode()

    subject.check([asked.answer for asked in workers.answer(subject.cases, before_step=kill)])
    assert workers.num_returned >= len(subject.cases)
    workers.assert_idle()


def test_a_block_of_8_bits_has_the_same_bytes_whatever_happened(
    subject_of: Callable[[Any], Subject], make_workers: Make
) -> None:
    """Compares blocks of prompts in one chunk and of decode with those of small chunks, copies, and a swap."""
    subject = subject_of(INT8_CACHE)
    quiet = make_workers(subject)
    quiet.answer(subject.cases)
    written = sealed_bytes(quiet)
    num_blocks = TIGHT * len(subject.runner.layout.groups)
    busy = make_workers(subject, budget=16, num_blocks=num_blocks, preemption="swap")
    busy.answer(subject.cases)
    assert busy.preemption.counts.resumed_groups > 0
    found = sealed_bytes(busy)
    common = written.keys() & found.keys()
    assert len(common) >= TIGHT // 2
    assert all(written[prefix_hash] == found[prefix_hash] for prefix_hash in common)


def sealed_bytes(workers: Workers) -> dict[bytes, bytes]:
    """Returns the content of each block that has a prefix hash."""
    arena = workers.arena
    full = arena.hashes.any(axis=1).nonzero()[0]
    return {arena.hashes[block].tobytes(): arena.data[block].tobytes() for block in full}


# --- tests of the tests: each path above can fail


def test_one_flipped_byte_in_a_block_shows(llama: Subject, make_workers: Make) -> None:
    workers = make_workers(llama)

    def flip(them: Workers) -> None:
        if them.num_steps == 3:
            [held] = [a.held for a in them.attachments[1:]]
            ref = held.holder.holdings()[0]
            them.arena.data[ref.block, 3] ^= 0x40  # in the exponent of a key of layer 0

    found = [asked.answer for asked in workers.answer(llama.cases, before_step=flip)]
    assert differences(llama.cases, llama.expected, found)


def test_one_skipped_copy_shows(llama: Subject, make_workers: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = make_workers(llama)
    copy, skipped = llama.runner.copy_blocks, list[int]()

    def skip_one(src_ids: list[int], dst_ids: list[int]) -> None:
        if src_ids and not skipped:
            skipped.append(dst_ids[0])
            src_ids, dst_ids = src_ids[1:], dst_ids[1:]
        copy(src_ids, dst_ids)

    monkeypatch.setattr(llama.runner, "copy_blocks", skip_one)
    found = [asked.answer for asked in workers.answer(llama.cases)]
    assert skipped and differences(llama.cases, llama.expected, found)


def drop_too_early(patch: pytest.MonkeyPatch) -> None:
    """Releases a block that the next position still reads."""
    first_needed = Retention.first_needed

    def one_later(spec: Retention, num_computed: int, block_size: int) -> int:
        first = first_needed(spec, num_computed, block_size)
        return first + 1 if 0 < first < -(-num_computed // block_size) - 1 else first

    patch.setattr(Retention, "first_needed", one_later)


def take_the_window_of_another_length(patch: pytest.MonkeyPatch) -> None:
    """Finds the prefix, but takes a window's blocks for a prefix that is one block shorter."""
    take = cached_prefix._with_windows

    def shifted(held: Any, tables: Any, named: dict[int, list[bytes]], layout: Any) -> Any:
        return take(held, tables, {g: [*hashes[:1], *hashes[:-1]] for g, hashes in named.items()}, layout)

    patch.setattr(cached_prefix, "_with_windows", shifted)


def mix_up_the_groups(patch: pytest.MonkeyPatch) -> None:
    """Publishes the blocks of all groups under one hash."""
    for module in (cached_prefix, sealing, swap):
        patch.setattr(module, "group_hash", lambda block_hash, group: block_hash)


def hand_over_what_was_dropped(patch: pytest.MonkeyPatch) -> None:
    """Puts all entries of a table into a ticket."""
    patch.setattr(BlockTable, "live", property(lambda table: table[:]))


def skip_the_copies_of_states(patch: pytest.MonkeyPatch) -> None:
    """Lets copy-on-write copy only keys and values."""

    def without_states(writes: CopyOnWrite, copying: Any) -> None:
        runner = writes._runner
        kept = [i for i, group in enumerate(runner.layout.groups) if group.kind is not KvKind.STATE]
        pairs = [(s.copy_from[i].block, s.tables[i][-1].block) for s in copying for i in kept]
        runner.copy_blocks(*([pair[side] for pair in pairs] for side in (0, 1)))

    patch.setattr(CopyOnWrite, "copy", without_states)


WINDOW_BUGS = (drop_too_early, take_the_window_of_another_length, mix_up_the_groups, hand_over_what_was_dropped)
STATE_BUGS = (*WINDOW_BUGS[1:], skip_the_copies_of_states)


@pytest.mark.parametrize(
    ("family", "bug"),
    [*(("gemma3", bug) for bug in WINDOW_BUGS), *(("bamba", bug) for bug in STATE_BUGS)],
)
def test_a_bug_in_the_handling_of_windows_and_states_shows(
    subject_of: Callable[[Any], Subject], make_workers: Make, monkeypatch: pytest.MonkeyPatch, family: str, bug: Any
) -> None:
    subject = subject_of(family)
    workers = make_workers(subject, budget=64)
    bug(monkeypatch)
    for _ in ("cold", "cached"):
        try:
            found = [asked.answer for asked in workers.answer(subject.cases)]
        except Exception as error:
            assert bug is hand_over_what_was_dropped, repr(error)
            return
        if differences(subject.cases, subject.expected, found):
            return
    raise AssertionError("it does not show")


class Lazy(Retention):
    """A window that keeps blocks longer than necessary."""

    def first_needed(self, num_computed: int, block_size: int) -> int:
        return super().first_needed(num_computed, block_size) // 2 * 2

    def most_held(self, num_tokens: int, block_size: int, step: int = 1) -> int:
        return super().most_held(num_tokens, block_size, step) + 1


class LazySpec(KvSpec):
    @property
    def retention(self) -> Retention:
        return Lazy(self.window)


def test_another_kind_of_group_needs_no_change_elsewhere(
    subject_of: Callable[[Any], Subject], make_workers: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = subject_of("gemma3")
    layout = subject.runner.layout
    groups = tuple(LazySpec(**asdict(group)) if group.window else group for group in layout.groups)
    monkeypatch.setattr(subject.runner, "layout", replace(layout, groups=groups))
    for tight in (None, TIGHT):
        size = None if tight is None else tight * len(groups)
        workers = make_workers(subject, num_blocks=size, preemption="swap")
        for _ in ("cold", "cached"):
            subject.check([asked.answer for asked in workers.answer(subject.cases)])
        workers.assert_idle()


def test_a_log_probability_that_is_off_by_more_than_the_tolerance_shows(llama: Subject) -> None:
    [case, *_], [[text, *_], *_] = llama.cases, llama.expected
    for off, shows in ((0.9e-4, False), (1.1e-4, True)):
        logprobs = [*text.logprobs[:-1], replace(text.logprobs[-1], logprob=text.logprobs[-1].logprob + off)]
        changed = Text(text.token_ids, logprobs, text.finish_reason)
        assert bool(differences([case], [[text]], [[changed]])) == shows
