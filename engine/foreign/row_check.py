"""Checks at startup, bit by bit, whether a row of a model's results depends on the other rows of its batch.

The check can find that the rows of a model depend on each other. It cannot prove that they are independent
(docs/design.md, Numbers).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from common.types import KvLayout
from engine.errors import UnsupportedModel
from engine.foreign.model import TransformersModel
from engine.model_runner import ModelRunner
from engine.step import StepInput

logger = logging.getLogger("engine")
NUM_TOKENS = 10
CHUNK = 5
BATCH = 3


def check_rows(runner: ModelRunner) -> None:
    """Checks whether the rows of a transformers model are independent. Does nothing for other models, or on a GPU
    without `deterministic`. If a row depends on other rows, raises UnsupportedModel, or, with `allow_variant_numerics`,
    marks the model as variant.
    """
    model, settings = runner.model, runner.settings
    on_gpu = runner.device.compute_capability is not None
    if not isinstance(model, TransformersModel) or (on_gpu and not settings.deterministic):
        return
    if not (found := variation(runner)):
        return
    what = f"a row of this model depends on the other rows of its batch (logits differ by up to {found:.2g})"
    if not settings.allow_variant_numerics:
        raise UnsupportedModel(
            f"{what}: tokens may depend on the load; --allow-variant-numerics serves the model anyway"
        )
    logger.warning("%s: tokens may depend on the load", what)
    model.is_variant = True


def variation(runner: ModelRunner) -> float:
    """Computes the same tokens one at a time, in chunks of CHUNK tokens, and in such chunks of BATCH sequences at once.
    Returns the largest difference between the logits of tokens that are computed one at a time and those of the same
    tokens in chunks. 0 means that all logits are equal.
    """
    layout = runner.layout
    blocks = -(-NUM_TOKENS // layout.block_size)
    tokens = torch.randint(runner.config.vocab_size, (NUM_TOKENS,), generator=torch.Generator().manual_seed(0))
    with runner.using(runner.new_arena(BATCH * blocks * len(layout.groups), fill=0xFF)):
        alone = _rows(runner, _steps(tokens.numpy(), 1, 1, layout))
        in_chunks = _rows(runner, _steps(tokens.numpy(), CHUNK, 1, layout))
        together = _rows(runner, _steps(tokens.numpy(), CHUNK, BATCH, layout))
    each = [in_chunks, *together.view(-1, BATCH, CHUNK, together.shape[1]).transpose(0, 1).flatten(1, 2)]
    differences = [(alone - other).abs().max().item() for other in each if not torch.equal(alone, other)]
    return max((found or float("inf") for found in differences), default=0.0)


def _rows(runner: ModelRunner, steps: Iterator[StepInput]) -> torch.Tensor:
    return torch.cat([runner.step(step).clone().cpu() for step in steps])


def _steps(tokens: npt.NDArray[np.int64], chunk: int, num_seqs: int, layout: KvLayout) -> Iterator[StepInput]:
    """Yields steps that run the same tokens for every sequence, `chunk` tokens at a time. Sequences share no blocks."""
    size, num_groups = layout.block_size, len(layout.groups)
    blocks = -(-len(tokens) // size)
    tables = np.arange(num_groups * num_seqs * blocks, dtype=np.int32).reshape(num_groups, num_seqs, blocks)
    for start in range(0, len(tokens), chunk):
        positions = np.arange(start, min(start + chunk, len(tokens)), dtype=np.int64)
        slots = tables[:, :, positions // size].astype(np.int64) * size + positions % size
        yield StepInput(
            token_ids=np.tile(tokens[positions], num_seqs),
            positions=np.tile(positions, num_seqs),
            slot_mappings=tuple(slots.reshape(num_groups, -1)),
            cu_seqlens_q=np.arange(num_seqs + 1, dtype=np.int32) * len(positions),
            context_lens=np.full(num_seqs, positions[-1] + 1, dtype=np.int32),
            block_tables=tuple(tables),
            logits_rows=np.arange(num_seqs * len(positions), dtype=np.int64),
        )
