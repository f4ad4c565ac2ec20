"""Sequences, and the arrays of the steps that compute the sequences. A sequence's tokens are its prompt and its
outputs. The KV of position p is in block table[p // block_size], slot p % block_size. The KV of the first
`num_computed` positions is computed, and the first `num_sealed` blocks are sealed. A sequence has one table for each KV
group.

    tokens   | block 0 (sealed) | block 1 (sealed) | block 2: computed . . | next |
                                                     ^ num_computed
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from common.types import (
    BlockRef,
    CacheQuota,
    FinishReason,
    KvLayout,
    Pooling,
    PromptSources,
    SamplingParams,
    StoppingParams,
    TokenLogprob,
)
from engine.block_table import BlockTable
from engine.grammar_state import GrammarState
from engine.step import StepInput

if TYPE_CHECKING:
    from engine.lora import LoraAdapter


@dataclass(slots=True, eq=False)
class Sequence:
    """A sample or beam of a request, with its tokens, its block tables and its progress."""

    prompt_ids: list[int]
    output_ids: list[int]
    sampling: SamplingParams
    stopping: StoppingParams
    sample_index: int = 0
    table: BlockTable = field(default_factory=BlockTable)
    """Block table of the first KV group."""
    more_tables: tuple[BlockTable, ...] = ()
    """Block tables of the other KV groups; most models have one group."""
    hashes: list[bytes] = field(default_factory=list)
    """The start of the hash chain (domain and salt), then the prefix hashes of the leading full blocks that have been
    hashed so far.
    """
    rekey: tuple[int, bytes] | None = None
    """The index of the first block that is not public (docs/tenants.md, Shared prefixes), and the parent of its hash.
    None if the parent of every hash is the preceding block's hash.
    """
    quota: CacheQuota | None = None
    """The quota of the tenant's cached blocks; None if there is no quota."""
    num_computed: int = 0
    num_sealed: int = 0
    tail_sealed: bool = False
    """Whether the last block of the table is sealed and partial. If so, it is copied before a token is appended
    (copy-on-write).
    """
    copy_from: tuple[BlockRef, ...] = ()
    """The sealed blocks, one per KV group, whose content must still be copied into the last blocks of the tables."""
    num_cached: int = 0
    """Number of positions whose blocks were found in the prefix index at admission."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    grammar: GrammarState | None = None
    """The sample's state in its grammar; None for free text."""
    pooling: Pooling | None = None
    """The method that pools the prompt's hidden states into one vector; None if tokens are generated."""
    adapter: LoraAdapter | None = None
    """The adapter with which all positions are computed; None for the base model."""

    @property
    def wants_every_row(self) -> bool:
        """Whether results for all positions are required, because the request needs log-probabilities of the prompt or
        the mean of its states.
        """
        return self.sampling.prompt_logprobs is not None or self.pooling == "mean"

    @property
    def tables(self) -> tuple[BlockTable, ...]:
        """One block table per KV group."""
        return (self.table, *self.more_tables)

    def set_tables(self, tables: Iterable[BlockTable]) -> None:
        self.table, *others = tables
        self.more_tables = tuple(others)

    def live_refs(self) -> list[BlockRef]:
        """Returns the blocks of all tables, in token order within each table, without the blocks that have been
        dropped.
        """
        if not self.more_tables:
            return self.table.live
        return [ref for table in self.tables for ref in table.live]

    def drop_unneeded(self, layout: KvLayout) -> list[BlockRef]:
        """Drops the blocks that no later position reads, and returns them. The caller must release them."""
        dropped: list[BlockRef] = []
        for spec, table in zip(layout.groups, self.tables, strict=True):
            dropped += table.drop(spec.retention.first_needed(self.num_computed, layout.block_size))
        return dropped

    def forget_blocks(self) -> None:
        """Empties the tables without releasing the blocks."""
        self.set_tables(BlockTable() for _ in self.tables)
        self.copy_from = ()

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_ids + self.output_ids

    def tokens_between(self, start: int, end: int) -> list[int]:
        """Returns the tokens at positions start..end-1."""
        num_prompt = len(self.prompt_ids)
        if end <= num_prompt:
            return self.prompt_ids[start:end]
        if start >= num_prompt:
            return self.output_ids[start - num_prompt : end - num_prompt]
        return self.prompt_ids[start:] + self.output_ids[: end - num_prompt]

    def fork(self, sample_index: int) -> Sequence:
        """Returns another sample or beam with the same tokens, in the same blocks. The caller must add a reference to
        each block.
        """
        return Sequence(
            self.prompt_ids,
            self.output_ids.copy(),
            self.sampling,
            self.stopping,
            sample_index,
            self.table.copy(),
            tuple(table.copy() for table in self.more_tables),
            self.hashes.copy(),
            self.rekey,
            self.quota,
            num_computed=self.num_computed,
            num_sealed=self.num_sealed,
            tail_sealed=self.tail_sealed,
            num_cached=self.num_cached,
            grammar=None if self.grammar is None else self.grammar.fork(),
            adapter=self.adapter,
        )

    def num_full_blocks(self, block_size: int) -> int:
        """Returns the number of blocks in which the KV of every slot is computed."""
        return self.num_computed // block_size

    def extend_hashes(self, num_blocks: int, block_size: int, next_hash: Callable[[bytes, Seq[int]], bytes]) -> None:
        """Extends `hashes` to `num_blocks` blocks. `hashes` must already contain the start of the chain."""
        while len(self.hashes) <= num_blocks:
            block = len(self.hashes) - 1
            ids = self.tokens_between(block * block_size, (block + 1) * block_size)
            parent = self.rekey[1] if self.rekey is not None and self.rekey[0] == block else self.hashes[-1]
            self.hashes.append(next_hash(parent, ids))

    def block_hash(self, block: int) -> bytes:
        """Returns the hash of a full block. `hashes[0]` is the start of the chain (domain and salt)."""
        return self.hashes[block + 1]

    def quota_of(self, block: int) -> CacheQuota | None:
        """Returns the quota of a block. Public blocks do not count against any quota."""
        return None if self.rekey is not None and block < self.rekey[0] else self.quota

    def sources(self) -> PromptSources:
        """Returns how many positions of the prompt were cached and how many were computed. Output positions that were
        prefilled again do not count.
        """
        cached = min(self.num_cached, len(self.prompt_ids))
        return PromptSources(cached=cached, computed=len(self.prompt_ids) - cached)

    def finish_reason(self, max_model_len: int) -> FinishReason | None:
        """Returns why the newest token ended the sequence, or None if the sequence continues."""
        num_outputs = len(self.output_ids)
        if num_outputs == 0:
            return None
        by_limits = self.stopping.finish_reason(self.output_ids[-1], num_outputs)
        if by_limits is FinishReason.STOP:
            return by_limits
        if self.grammar is not None and self.grammar.is_over(self.output_ids):
            return FinishReason.STOP
        return FinishReason.LENGTH if num_outputs + len(self.prompt_ids) >= max_model_len else by_limits


@dataclass(frozen=True, slots=True)
class Chunk:
    """A range of `num_tokens` consecutive positions of a sequence that one step computes."""

    sequence: Sequence
    num_tokens: int

    @property
    def end(self) -> int:
        """The number of positions whose KV is computed after the step."""
        return self.sequence.num_computed + self.num_tokens

    @property
    def completes(self) -> bool:
        """Whether the step computes the newest token, so that the next one can be drawn."""
        return self.end == self.sequence.num_tokens


@dataclass(frozen=True, slots=True)
class Step:
    """The arrays of one forward pass, and the generations of the blocks that the pass reads (for the reader rule)."""

    batch: StepInput
    """The arrays of the step. Each row of a block table is padded with its first block, so that every entry may be
    checked.
    """
    generations: tuple[npt.NDArray[np.uint64], ...]  # per KV group [B, max_blocks], as batch.block_tables


def lay_out(chunks: Seq[Chunk], block_size: int) -> Step:
    """Returns the step that computes these chunks.

    The step computes results for the last row of each chunk that completes its sequence, and for every row of a
    sequence that requires it (`Sequence.wants_every_row`).
    """
    q_lens = np.array([c.num_tokens for c in chunks], np.int32)
    starts = np.array([c.sequence.num_computed for c in chunks], np.int64)
    context_lens = (starts + q_lens).astype(np.int32)
    num_blocks = -(-context_lens // block_size)
    groups = [_tables([c.sequence.tables[g] for c in chunks], num_blocks) for g in range(_num_groups(chunks))]
    cu_seqlens_q = np.zeros(len(chunks) + 1, np.int32)
    np.cumsum(q_lens, out=cu_seqlens_q[1:])
    rows = np.repeat(np.arange(len(chunks)), q_lens)  # [T]
    positions = np.arange(cu_seqlens_q[-1], dtype=np.int64) - cu_seqlens_q[:-1][rows] + starts[rows]
    blocks, offsets = positions // block_size, positions % block_size
    slot_mappings = tuple(table[rows, blocks].astype(np.int64) * block_size + offsets for table, _ in groups)
    tokens = [t for c in chunks for t in c.sequence.tokens_between(c.sequence.num_computed, c.end)]
    batch = StepInput(
        np.array(tokens, np.int64),
        positions,
        slot_mappings,
        cu_seqlens_q,
        context_lens,
        tuple(table for table, _ in groups),
        _wanted_rows(chunks, cu_seqlens_q),
        adapters_of([c.sequence for c in chunks]),
    )
    return Step(batch, tuple(generations for _, generations in groups))


def adapters_of(sequences: Seq[Sequence]) -> tuple[LoraAdapter | None, ...]:
    """Returns the adapter of every sequence, or an empty result if no sequence has an adapter."""
    found = tuple(sequence.adapter for sequence in sequences)
    return found if any(adapter is not None for adapter in found) else ()


def _num_groups(chunks: Seq[Chunk]) -> int:
    return len(chunks[0].sequence.tables)


def _tables(
    tables: Seq[BlockTable], num_blocks: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint64]]:
    """Returns block numbers and generations [B, max_blocks], in which each row is padded with its first block."""
    block_table = np.zeros((len(tables), int(num_blocks.max())), np.int32)
    generations = np.zeros(block_table.shape, np.uint64)
    for row, table in enumerate(tables):
        used = int(num_blocks[row])
        table.copy_to(block_table[row, :used], generations[row, :used])
    padding = np.arange(block_table.shape[1]) >= num_blocks[:, None]
    np.copyto(block_table, block_table[:, :1], where=padding)
    np.copyto(generations, generations[:, :1], where=padding)
    return block_table, generations


def _wanted_rows(chunks: Seq[Chunk], cu_seqlens_q: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    rows: list[int] = []
    for index, chunk in enumerate(chunks):
        start, end = int(cu_seqlens_q[index]), int(cu_seqlens_q[index + 1])
        if chunk.sequence.wants_every_row:
            rows += range(start, end)
        elif chunk.completes:
            rows.append(end - 1)
    return np.array(rows, np.int64)
