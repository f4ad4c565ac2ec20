"""Beam search compared with transformers: ids and scores of a real model in fp32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from common.types import BlockRef, EarlyStopping, FinishReason, SamplingParams, StoppingParams
from engine.beam_search import BeamSearch, Hypothesis
from engine.block_table import BlockTable
from engine.model_runner import ModelRunner, RunnerSettings
from engine.sampler import SampleRow, beam_candidates
from engine.sequence import Chunk, lay_out
from engine.sequence import Sequence as OneSequence
from engine.tiny import make_checkpoint
from testing.engine import poisoned_arena
from testing.oracle import Oracle

VOCAB_SIZE, EOS_IDS = 64, (2, 9, 33)
PROMPT_LENS, PROMPTS_EACH = (7, 16), 10
NEW_TOKENS = 24
TABLE_LEN = 3  # number of blocks of 16 for the longest prompt and its output
RULES: tuple[EarlyStopping, ...] = (False, True, "never")
PENALTIES = (0.6, 1.0, 2.0)


def prompts(length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(5, VOCAB_SIZE, (PROMPTS_EACH, length), generator=generator).tolist()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("beam")
    return make_checkpoint(path, "llama", seed=11, num_hidden_layers=2, vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def runner(directory: Any) -> ModelRunner:
    return ModelRunner(RunnerSettings(directory, dtype="float32", num_threads=1, deterministic=True))


@pytest.fixture(scope="module")
def reference(directory: Any) -> Iterator[Any]:
    from transformers import AutoModelForCausalLM

    yield AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def sampling_of(width: int, penalty: float, rule: EarlyStopping) -> SamplingParams:
    return SamplingParams(num_sequences=width, beam_width=width, length_penalty=penalty, early_stopping=rule)


class Batch:
    """The beam searches of many prompts, with all beams in one step. A fork copies all blocks of a beam."""

    def __init__(self, runner: ModelRunner, ids: Sequence[list[int]], sampling: SamplingParams) -> None:
        self._runner, self._width = runner, sampling.width
        runner.bind(poisoned_arena(runner, len(ids) * 2 * self._width * TABLE_LEN))
        stopping = StoppingParams(NEW_TOKENS, stop_token_ids=EOS_IDS)
        self.searches = [BeamSearch(sampling, stopping, len(prompt), 100) for prompt in ids]
        self._beams = [[OneSequence(list(prompt), [], sampling, stopping)] for prompt in ids]
        for number, beams in enumerate(self._beams):
            beams[0].table = self._table(number, 0, 0)
        self._num_steps = 0

    def run(self) -> list[list[Hypothesis]]:
        while any(self._beams):
            self._step()
        return [search.best() for search in self.searches]

    def _table(self, number: int, half: int, beam: int) -> BlockTable:
        first = ((number * 2 + half) * self._width + beam) * TABLE_LEN
        return BlockTable(BlockRef(first + i, 1) for i in range(TABLE_LEN))

    def _step(self) -> None:
        self._num_steps += 1
        live = [sequence for beams in self._beams for sequence in beams]
        chunks = [Chunk(sequence, sequence.num_tokens - sequence.num_computed) for sequence in live]
        logits = self._runner.step(lay_out(chunks, 16).batch)
        for chunk in chunks:
            chunk.sequence.num_computed = chunk.end
        counts = [
            search.num_candidates for search, beams in zip(self.searches, self._beams, strict=True) for _ in beams
        ]
        candidates = iter(beam_candidates(logits, [SampleRow.of(sequence) for sequence in live], counts))
        copies: list[tuple[int, int]] = []
        for number, (search, beams) in enumerate(zip(self.searches, self._beams, strict=True)):
            if beams:
                parents = search.advance([next(candidates) for _ in beams])
                self._beams[number] = [beams[parent].fork(rank) for rank, parent in enumerate(parents)]
                for rank, (fork, beam) in enumerate(zip(self._beams[number], search.running, strict=True)):
                    fork.output_ids.append(beam.token_ids[-1])
                    table = self._table(number, self._num_steps % 2, rank)
                    copies += zip((ref.block for ref in fork.table), (ref.block for ref in table), strict=True)
                    fork.table = table
        self._runner.copy_blocks([src for src, _ in copies], [dst for _, dst in copies])


def theirs(model: Any, ids: list[list[int]], width: int, penalty: float, rule: EarlyStopping) -> list[list[Any]]:
    """Returns (output ids, score) from transformers, best first, for each prompt. Prompts of equal length need no
    padding."""
    found = model.generate(
        torch.tensor(ids), attention_mask=torch.ones(len(ids), len(ids[0])), do_sample=False,
        num_beams=width, num_return_sequences=width, length_penalty=penalty, early_stopping=rule,
        max_new_tokens=NEW_TOKENS, eos_token_id=list(EOS_IDS), pad_token_id=0,
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    outputs = [cut(row) for row in found.sequences[:, len(ids[0]) :].tolist()]
    pairs = list(zip(outputs, found.sequences_scores.tolist(), strict=True))
    return [pairs[i : i + width] for i in range(0, len(pairs), width)]


def cut(output: list[int]) -> list[int]:
    """Removes the padding after the first stop token."""
    ends = [i for i, token in enumerate(output) if token in EOS_IDS]
    return output[: ends[0] + 1] if ends else output


def assert_same(ours: list[Hypothesis], want: list[Any]) -> None:
    assert [found.token_ids for found in ours] == [ids for ids, _ in want]
    assert [found.score for found in ours] == pytest.approx([score for _, score in want], abs=1e-4)
    for found in ours:
        ended = found.token_ids[-1] in EOS_IDS
        assert found.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("width", [2, 4])
@torch.inference_mode()
def test_twenty_prompts_give_the_ids_and_scores_of_transformers(
    runner: ModelRunner, reference: Any, width: int, rule: EarlyStopping
) -> None:
    num_stopped, num_whole = 0, 0
    for penalty in PENALTIES:
        groups = [prompts(length) for length in PROMPT_LENS]
        want = [found for ids in groups for found in theirs(reference, ids, width, penalty, rule)]
        ours = Batch(runner, [prompt for ids in groups for prompt in ids], sampling_of(width, penalty, rule)).run()
        assert len(ours) == len(want) == 20
        for mine, other in zip(ours, want, strict=True):
            assert len(mine) == width
            assert_same(mine, other)
            stopped = [found.finish_reason is FinishReason.STOP for found in mine]
            num_stopped += any(stopped)
            num_whole += all(stopped)
    assert num_stopped >= 20 and num_whole >= 10, "too few beams end early: the comparison says little"


@torch.inference_mode()
def test_the_oracle_whose_beams_run_alone_agrees(runner: ModelRunner, reference: Any) -> None:
    oracle, ids = Oracle(runner), [prompts(length)[0] for length in PROMPT_LENS]
    for prompt, penalty in zip(ids, (0.6, 2.0), strict=True):
        stopping = StoppingParams(NEW_TOKENS, stop_token_ids=EOS_IDS)
        ours = oracle.beam_search(prompt, sampling_of(4, penalty, False), stopping)
        assert_same(ours, theirs(reference, [prompt], 4, penalty, False)[0])


@torch.inference_mode()
def test_one_beam_is_greedy_decoding(runner: ModelRunner) -> None:
    """There are no stop tokens, because a beam search may continue after its best beam has ended."""
    oracle, prompt = Oracle(runner), prompts(7)[1]
    stopping = StoppingParams(NEW_TOKENS)
    found = oracle.beam_search(prompt, SamplingParams(beam_width=1, logprobs=0), stopping)
    greedy = oracle.draw(prompt, SamplingParams(temperature=0.0, logprobs=0), stopping)
    assert found[0].token_ids == [drawn.token_id for drawn in greedy]
    assert found[0].logprobs == [drawn.logprob for drawn in greedy]
    total = sum(entry.logprob for entry in found[0].logprobs)
    assert found[0].score == pytest.approx(total / NEW_TOKENS, abs=1e-5)
