"""A rank's place among its worker's ranks, which determines its stage of the model and its share of each layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.config import ModelConfig
from engine.ranks.shard import WHOLE, Shard
from engine.ranks.stage import ALL_LAYERS, Stage


class Asked(Protocol):
    """The interface of settings that determine the ranks of a worker."""

    @property
    def tensor_parallel_size(self) -> int: ...

    @property
    def pipeline_parallel_size(self) -> int: ...

    @property
    def reduction_parts(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a rank, which consists of its stage and its share. Ranks are numbered stage by stage, as in vLLM and
    Megatron.
    """

    stage: Stage = ALL_LAYERS
    shard: Shard = WHOLE

    @classmethod
    def of(cls, rank: int, settings: Asked) -> Place:
        """Returns the place of a rank. Raises ModelError if the tensor-parallel size or the number of parts is not
        allowed.
        """
        size = settings.tensor_parallel_size
        shard = Shard.of(rank % size, size, settings.reduction_parts)
        return cls(Stage(rank // size, settings.pipeline_parallel_size), shard)

    @property
    def rank(self) -> int:
        return self.stage.index * self.shard.size + self.shard.rank

    @property
    def size(self) -> int:
        """The number of ranks of the worker."""
        return self.stage.count * self.shard.size

    def ranks_of(self, stage: int) -> range:
        """Returns the ranks of a stage, in the order of their shares."""
        return range(stage * self.shard.size, (stage + 1) * self.shard.size)

    def check(self, c: ModelConfig) -> None:
        """Raises ModelError, which names the field or setting, if the model cannot be divided in this way."""
        self.shard.check(c)
        self.stage.check(c)
