"""A draft model: a second, smaller model of the same vocabulary, which predicts the tokens that follow sequences.

The draft model has its own blocks in private memory, which the ledger does not know. Its keys and values of a sequence
can be lost at any time: that costs predictions, but no token. A sequence's state here is a copy of the sequence (its
*shadow*) whose output ends with the tokens that the draft model has drawn:

    tokens of the sequence   | prompt | accepted outputs         |
    tokens of the shadow     | prompt | accepted outputs | drawn |
                                            ^ num_computed: the draft model has keys and values up to here

The draft model draws with the sequence's own sampling parameters, seed and position, but without its grammar. Random
numbers are counter-based (`engine.sampler`), so two models with similar logits usually draw the same token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path

from common.group_need import blocks_of
from common.telemetry import Fallbacks
from common.types import BlockRef
from engine.block_table import BlockTable
from engine.config import ModelConfig
from engine.errors import ModelError
from engine.model_runner import ModelRunner
from engine.sequence import Chunk, Sequence, lay_out
from engine.step_sampler import Sampler

logger = logging.getLogger("engine")
RECENT = 32
"""A state that one of the last RECENT rounds used is not evicted. Otherwise, sequences that do not fit together would
evict each other's states again and again.
"""


def draft_path(model: str) -> str:
    """Returns the directory of a draft model, which may begin with `~`."""
    return str(Path(model).expanduser())


def load_draft_model(model: str, target: ModelRunner) -> ModelRunner:
    """Loads the draft model in the directory `model` for a target. Of the target's settings, it has those of the
    machine, and it computes with the threads of the target's first rank. Raises ModelError, which names the field of
    `--speculative-config`, if it cannot be loaded or does not fit the target.
    """
    settings, path = target.settings, draft_path(model)
    try:
        config = ModelConfig.from_directory(path, settings.model_impl)
        if config.vocab_size != target.config.vocab_size:
            raise ModelError(f"its vocabulary has {config.vocab_size} tokens, the target's {target.config.vocab_size}")
        runner = ModelRunner(
            replace(
                settings, model=path, num_threads=settings.threads_of_rank, tensor_parallel_size=1,
                pipeline_parallel_size=1, reduction_parts=None, block_size=None, enable_lora=False,
                max_model_len=min(target.max_model_len, config.max_model_len),
                quantization=None if config.weight_format is not None else settings.quantization,
            )
        )  # fmt: skip
        if runner.layout.has_states:
            raise ModelError("a recurrent state cannot be set back by rejected tokens")
    except ModelError as error:
        raise ModelError(f"speculative_config.model {model}: {error}") from error
    logger.info("draft model %s: %.1f MiB of weights", model, runner.weights_bytes / 2**20)
    return runner


def num_draft_blocks(runner: ModelRunner, max_num_seqs: int, max_bytes: int) -> int:
    """Returns the number of the draft model's blocks: as many as fit into `max_bytes`, but not more than `max_num_seqs`
    sequences of full length need. There is at least one block for each KV group.
    """
    groups = len(runner.layout.groups)
    return max(groups, min(max_num_seqs * runner.max_blocks * groups, max_bytes // runner.layout.block_bytes))


@dataclass(slots=True)
class _State:
    """The draft model's state of one sequence."""

    shadow: Sequence
    num_known: int
    """Number of the sequence's outputs that the shadow's outputs have been compared with."""
    used_at: int


class DraftModel:
    """A draft model with its private blocks. The object is used in the step thread."""

    def __init__(self, runner: ModelRunner, num_blocks: int) -> None:
        """Allocates the blocks, and binds them to `runner`, which nothing else may use."""
        self._runner = runner
        self._size, self._num_groups = runner.layout.block_size, len(runner.layout.groups)
        runner.bind(runner.new_arena(num_blocks))
        self._free = list(range(num_blocks))[::-1]
        self._states: dict[Sequence, _State] = {}
        self._sampler = Sampler()
        self._round = 0
        self._fallbacks = Fallbacks(logger)
        self.num_rows = 0
        """The number of tokens that the last step computed."""

    @property
    def max_model_len(self) -> int:
        """Maximum length, in tokens, of a sequence that the draft model can compute."""
        return self._runner.max_model_len

    @property
    def num_free(self) -> int:
        """The number of free blocks."""
        return len(self._free)

    def settle(self, error: Exception) -> None:
        """Handles a failure of `step` (`ModelRunner.settle`), and drops all states."""
        self._runner.settle(error)
        self.begin_round(())

    def begin_round(self, sequences: Collection[Sequence]) -> None:
        """Begins the predictions for a step of the target. Drops the states of all sequences but these."""
        self._round += 1
        for gone in [sequence for sequence in self._states if sequence not in sequences]:
            self._drop(gone)

    def num_unseen(self, sequence: Sequence) -> int:
        """Returns how many of the sequence's tokens the draft model must still compute to predict the next one, at
        least 1. Forgets drawn tokens that turned out wrong.
        """
        if (state := self._states.get(sequence)) is None:
            return sequence.num_tokens
        shadow, outputs, same = state.shadow, sequence.output_ids, state.num_known
        for mine, real in zip(shadow.output_ids[same:], outputs[same:], strict=False):
            if mine != real:
                break
            same += 1
        shadow.output_ids[same:] = outputs[same:]
        state.num_known = len(outputs)
        shadow.num_computed = min(shadow.num_computed, len(shadow.prompt_ids) + same, shadow.num_tokens - 1)
        return shadow.num_tokens - shadow.num_computed

    def step(self, parts: Seq[tuple[Sequence, int]]) -> list[int | None]:
        """Computes up to `n` further tokens of each sequence, for pairs (sequence, n), in one pass. Draws a token for
        each sequence of which all tokens are then computed. The following call continues with this token, unless
        `num_unseen` is called before. Returns one entry per sequence, which is None if no token was drawn, because
        tokens are still missing or there is no block.
        """
        chunks: list[Chunk | None] = []
        for sequence, num_tokens in parts:
            state = self._states.get(sequence) or self._admit(sequence)
            state.used_at, shadow = self._round, state.shadow
            chunk = Chunk(shadow, min(num_tokens, shadow.num_tokens - shadow.num_computed))
            chunks.append(chunk if self._reserve(shadow, chunk.end) else None)
        found: list[int | None] = [None] * len(parts)
        fitting = [chunk for chunk in chunks if chunk is not None]
        self.num_rows = sum(chunk.num_tokens for chunk in fitting)
        if not fitting:
            return found
        logits = self._runner.step(lay_out(fitting, self._size).batch)
        ending = [chunk.sequence for chunk in fitting if chunk.completes]
        drawn = iter(self._sampler.draw(logits, ending) if ending else ())
        for place, chunk in enumerate(chunks):
            if chunk is not None:
                completes, chunk.sequence.num_computed = chunk.completes, chunk.end
                if completes:
                    found[place] = next(drawn).token_id
                    chunk.sequence.output_ids.append(found[place])
        return found

    # --- inside

    def _admit(self, sequence: Sequence) -> _State:
        """Creates a state without keys and values, except for those of a prompt that another sample has computed."""
        sampling = replace(sequence.sampling, logprobs=None, prompt_logprobs=None)
        shadow = Sequence(
            sequence.prompt_ids, sequence.output_ids.copy(), sampling, sequence.stopping, sequence.sample_index
        )
        shadow.set_tables(BlockTable() for _ in range(self._num_groups))
        state = self._states[sequence] = _State(shadow, len(shadow.output_ids), self._round)
        alike = [s.shadow for s in self._states.values() if s is not state and s.shadow.prompt_ids == shadow.prompt_ids]
        if alike:
            self._copy_prompt(max(alike, key=lambda other: other.num_computed), shadow)
        return state

    def _copy_prompt(self, source: Sequence, shadow: Sequence) -> None:
        num_shared = min(source.num_computed, len(shadow.prompt_ids))
        if num_shared and self._reserve(shadow, num_shared):
            tables = zip(source.tables, shadow.tables, strict=True)
            pairs = [(a.block, b.block) for old, new in tables for a, b in zip(old, new, strict=False)]
            self._runner.copy_blocks(*map(list, zip(*pairs, strict=True)))
            shadow.num_computed = num_shared

    def _reserve(self, shadow: Sequence, num_tokens: int) -> bool:
        """Gives the shadow blocks for its first `num_tokens` tokens, and returns whether there are enough. Evicts
        states that have not been used recently, the least recently used first.
        """
        missing = blocks_of(num_tokens, self._size) - len(shadow.table)
        while missing * self._num_groups > len(self._free):
            least: Callable[[Sequence], int] = lambda sequence: self._states[sequence].used_at  # noqa: E731
            oldest = min(self._states, key=least)
            if self._round - least(oldest) < RECENT:
                self._fallbacks.note("no draft", "the draft model's cache is full (speculative_config.kv_space)")
                return False
            self._drop(oldest)
        for table in shadow.tables:
            for _ in range(missing):
                table.append(BlockRef(self._free.pop(), 0))
        return True

    def _drop(self, sequence: Sequence) -> None:
        for table in self._states.pop(sequence).shadow.tables:
            self._free += [ref.block for ref in table]
