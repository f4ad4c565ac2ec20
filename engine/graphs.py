"""Captures decode steps of fixed shapes, which a GPU can replay. There is one CUDA graph for each of several batch
sizes, the *buckets*. A smaller batch is padded with rows to the next bucket.

A replay is a single launch, whereas an eager step launches several kernels per layer from Python. A padding row has
context 0 (attention gives zeros and reads no block) and slot -1 (nothing is written).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from engine.device import Device, Work
from engine.inputs import Place, StepBuffer
from engine.models.attention import GroupStep, StepMetadata
from engine.step import StepInput
from kernels.providers.base import AttentionBatch, AttentionProvider, HostBatch

Forward = Callable[[torch.Tensor, StepMetadata], torch.Tensor]
"""A function from token ids [B] and the step to logits [B, vocab] of all rows."""


def bucket_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Returns the batch sizes to capture: 1, 2, 4, 8, then every 8 up to 64 and every 16 above, and `max_num_seqs`
    itself.
    """
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, max_num_seqs + 1, 16)]
    return tuple(sorted({size for size in sizes if size < max_num_seqs} | {max_num_seqs}))


@dataclass(frozen=True, slots=True)
class Bucket:
    """A batch size, and the captured step for batches of that size."""

    size: int
    batch: AttentionBatch
    replay: Work


class DecodeGraphs:
    """The buckets of a runner, captured over one bound arena. All buckets read their inputs from the first rows of the
    same six arrays.
    """

    def __init__(self, device: Device, attention: AttentionProvider, max_blocks: int, logits: torch.Tensor) -> None:
        """Allocates the inputs of the buckets. `max_blocks` is the width of the block table. Every bucket writes to
        `logits`, fp32 [max_num_seqs, vocab].
        """
        self._device = device
        self._attention = attention
        self._logits = logits
        size, wide, narrow = len(logits), np.dtype(np.int64), np.dtype(np.int32)
        columns = [(wide, (size,))] * 3 + [(narrow, (size,)), (narrow, (size + 1,))]
        shapes = [*columns, (narrow, (size, max_blocks))]  # the table last: a small batch sends few rows
        self._row_bytes = max_blocks * narrow.itemsize
        self._column_bytes = StepBuffer.bytes_of(columns)
        self._buffer = StepBuffer(StepBuffer.bytes_of(shapes), device.torch_device)
        self._inputs = self._buffer.place(shapes)
        self._starts.host[:] = np.arange(size + 1)
        self._buckets: list[Bucket] = []

    @property
    def sizes(self) -> list[int]:
        return [bucket.size for bucket in self._buckets]

    def capture(self, size: int, forward: Forward) -> None:
        """Adds a bucket. Add the largest bucket first, so that smaller buckets reuse its memory. Raises the errors of
        `Device.record`.
        """
        tokens, positions, slots, lens, starts, table = (place.device for place in self._inputs)
        host = HostBatch(self._starts.host[: size + 1], self._lens.host[:size], self._table.host[:size])
        batch = AttentionBatch(starts[: size + 1], lens[:size], table[:size], host, decode_only=True, is_static=True)
        metadata = StepMetadata(positions[:size], GroupStep(slots[:size], batch), self._attention)
        out = self._logits[:size]

        def work() -> torch.Tensor:
            return out.copy_(forward(tokens[:size], metadata))

        self._pad(0, size)
        self._lens.host[:size] = 1  # not 0, because FlashAttention-3 divides by the total number of keys
        self._send(batch)
        self._buckets.insert(bisect_left(self.sizes, size), Bucket(size, batch, self._device.record(work)))

    def takes(self, batch: StepInput) -> bool:
        """Returns whether a bucket can run a step. The step must have one token per sequence, logits for every row, and
        no more rows than the largest bucket.
        """
        rows = len(batch.token_ids)
        return (
            rows == len(batch.context_lens) == len(batch.logits_rows)
            and bool(self._buckets)
            and rows <= self._buckets[-1].size
            and bool((batch.logits_rows == np.arange(rows)).all())
        )

    def run(self, batch: StepInput) -> torch.Tensor:
        """Starts a step for which `takes` returns True. Returns fp32 logits [B, vocab], valid until the next step."""
        rows = len(batch.token_ids)
        bucket = self._buckets[bisect_left(self.sizes, rows)]
        self._buffer.wait()
        columns = (batch.token_ids, batch.positions, batch.slot_mappings[0], batch.context_lens)
        for place, column in zip(self._inputs, columns, strict=False):
            place.host[:rows] = column
        width = min(self._table.host.shape[1], batch.block_tables[0].shape[1])  # the columns beyond are padding
        self._table.host[:rows, :width] = batch.block_tables[0][:, :width]
        self._pad(rows, bucket.size)
        self._send(bucket.batch)
        return bucket.replay()[:rows]

    # --- inside

    def _pad(self, start: int, end: int) -> None:
        """Fills rows `start` to `end - 1` with padding."""
        for place, nothing in zip(self._inputs, (0, 0, -1, 0), strict=False):  # token, position, slot, context
            place.host[start:end] = nothing

    def _send(self, batch: AttentionBatch) -> None:
        """Sends the inputs to the device, and prepares the attention provider outside the graph."""
        self._buffer.send(self._column_bytes + len(batch.host.context_lens) * self._row_bytes)
        batch.max_context_len = int(batch.host.context_lens.max())
        self._attention.prepare(batch)

    @property
    def _lens(self) -> Place:
        return self._inputs[3]

    @property
    def _starts(self) -> Place:
        return self._inputs[4]

    @property
    def _table(self) -> Place:
        return self._inputs[5]
