"""A rank's part of a model's layers under pipeline parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from common.tensor_parallel import MOST_RANKS
from engine.config import ModelConfig
from engine.errors import ModelError


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a model, which is one of `count` runs of consecutive layers. The first stage also has the embeddings.
    The last stage has the final norm and the head.
    """

    index: int = 0
    count: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether the stage is the whole model."""
        return self.count == 1

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def layers(self, num_layers: int) -> range:
        """Returns the indices of the stage's layers in a model of `num_layers` layers. The numbers of layers of two
        stages differ by at most one.
        """
        return range(num_layers * self.index // self.count, num_layers * (self.index + 1) // self.count)

    def check(self, c: ModelConfig) -> None:
        """Raises ModelError, which names the setting, if the model cannot be divided in this way."""
        if self.is_whole:
            return
        if not 1 <= self.count <= MOST_RANKS:
            raise ModelError(f"{self.asked} is not 1 to {MOST_RANKS}")
        if c.family in ("opt", "transformers"):
            what = "OPT" if c.family == "opt" else "a model of the transformers library"
            raise ModelError(f"{self.asked} does not support {what}")
        if self.count > c.num_layers:
            raise ModelError(f"{self.asked} is more than the model's {c.num_layers} layers")

    @property
    def asked(self) -> str:
        """The setting that requests this stage, for error messages."""
        return f"pipeline_parallel_size {self.count}"


ALL_LAYERS = Stage()
