"""The arrays of one forward pass, in the format of `ModelRunner.step`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from engine.lora import LoraAdapter


@dataclass(slots=True)
class StepInput:
    """The arrays of one forward pass over T tokens of B sequences, packed one sequence after another. Their contents,
    except that of `logits_rows`, may be changed for the next pass.
    """

    token_ids: npt.NDArray[np.int64]  # [T]
    positions: npt.NDArray[np.int64]  # [T]
    slot_mappings: tuple[npt.NDArray[np.int64], ...]  # per KV group [T], block * block_size + offset; negative: none
    cu_seqlens_q: npt.NDArray[np.int32]  # [B + 1]
    context_lens: npt.NDArray[np.int32]  # [B], including this step's tokens
    block_tables: tuple[npt.NDArray[np.int32], ...]  # per KV group [B, max_blocks]
    logits_rows: npt.NDArray[np.int64]  # [R], indices of the tokens whose logits are needed
    adapters: tuple[LoraAdapter | None, ...] = ()
    """One entry per sequence; empty if no sequence has an adapter."""
