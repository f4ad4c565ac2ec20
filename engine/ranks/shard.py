"""A rank's share of a model, which consists of heads, columns of the MLP and rows of the vocabulary, as in Megatron."""

from __future__ import annotations

from dataclasses import dataclass

from common.tensor_parallel import MOST_RANKS, default_parts
from engine.config import ModelConfig
from engine.errors import ModelError


@dataclass(frozen=True, slots=True)
class Shard:
    """One of the `size` shares into which a model's layers are divided."""

    rank: int = 0
    size: int = 1
    parts: int = 1
    """Number of parts, over all ranks, in which the output projections of attention and MLP are summed
    (`kernels.row_parallel`).
    """

    @classmethod
    def of(cls, rank: int, size: int, parts: int | None) -> Shard:
        """Returns the share of a rank. If `parts` is None, it is `default_parts(size)`. Raises ModelError if a number
        is not allowed.
        """
        chosen = parts or default_parts(size)
        for name, value in (("tensor_parallel_size", size), ("reduction_parts", chosen)):
            if value not in (1, 2, 4, MOST_RANKS):
                raise ModelError(f"{name} {value} is not 1, 2, 4 or {MOST_RANKS}")
        if size > chosen:
            raise ModelError(f"tensor_parallel_size {size} is more than reduction_parts {chosen}")
        return cls(rank, size, chosen)

    @property
    def is_whole(self) -> bool:
        """Whether products are summed in one part, as without tensor parallelism."""
        return self.parts == 1

    @property
    def own_parts(self) -> int:
        return self.parts // self.size

    def span(self, count: int, rank: int | None = None) -> slice:
        """Returns the range of a rank among `count` items. If `rank` is None, returns the range of this rank."""
        rank = self.rank if rank is None else rank
        return slice(count * rank // self.size, count * (rank + 1) // self.size)

    def check(self, c: ModelConfig) -> None:
        """Raises ModelError, which names the field, if the model cannot be divided in this way."""
        if self.is_whole:
            return
        if c.family in ("opt", "transformers"):
            what = "OPT" if c.family == "opt" else "a model of the transformers library"
            raise ModelError(f"{self.asked} does not support {what}")
        if c.experts is not None:
            raise ModelError(f"{self.asked} does not support mixtures of experts")
        if c.weight_format is not None:
            raise ModelError(f"{self.asked} does not support quantized weights")
        fields = (
            ("num_attention_heads", c.num_heads, self.size),
            ("num_key_value_heads", c.num_kv_heads, self.size),
            ("num_attention_heads * head_dim", c.num_heads * c.head_dim, self.parts),
            ("intermediate_size", c.intermediate_size, self.parts),
        )
        for name, value, divisor in fields:
            if value % divisor:
                raise ModelError(f"{self.asked} needs {name} to be a multiple of {divisor}, not {value}")

    @property
    def asked(self) -> str:
        """The settings that request this shard, for error messages."""
        return f"tensor_parallel_size {self.size} (reduction_parts {self.parts})"


WHOLE = Shard()
