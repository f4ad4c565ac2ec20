"""Computes the logits of a checkpoint with the transformers library, and their distance from Looseleaf's, for tests.

Two references show how close fp32 results can be: float64, and fp32 with correctly rounded operations
(`CorrectlyRounded`).
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from engine.model_runner import ModelRunner, RunnerSettings

NUM_TOKENS = 150


def runner_of(directory: Path, **settings: Any) -> ModelRunner:
    """Returns a runner of the checkpoint, by default in fp32, on the CPU, with transformers' model definition."""
    given: dict[str, Any] = {
        "dtype": "float32",
        "model_impl": "transformers",
        "num_threads": 2,
        "device": "cpu",
        "block_size": 16,
    }
    return ModelRunner(RunnerSettings(directory, **(given | settings)))


def prompt(vocab_size: int, length: int = NUM_TOKENS) -> list[int]:
    """Returns random tokens of a vocabulary. Equal arguments give equal tokens."""
    return torch.randint(5, vocab_size, (length,), generator=torch.Generator().manual_seed(1)).tolist()


def by_transformers(
    directory: Path, tokens: list[int], dtype: torch.dtype = torch.float32, *, one_by_one: bool = False
) -> torch.Tensor:
    """Returns the logits of transformers' model in `dtype`, as float64 [T, vocab]. They come from one pass over all
    tokens or, if `one_by_one` is True, from one pass for each token with transformers' cache.
    """
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    model.eval()
    rows: list[torch.Tensor] = []
    with torch.inference_mode():
        if not one_by_one:
            whole: torch.Tensor = model(torch.tensor([tokens])).logits[0]
            return whole.double()
        name, cache = cache_name(model), None
        for token in tokens:
            answer = model(torch.tensor([[token]]), use_cache=True, **{name: cache})
            cache = getattr(answer, name)
            rows.append(answer.logits[0, -1].double())
        return torch.stack(rows)


class CorrectlyRounded(TorchDispatchMode):
    """A mode in which torch computes operations on fp32 tensors in float64 and rounds each result to fp32 once. Views,
    operations in place, and operations with a `dtype` argument or a float64 tensor run unchanged. An addition in place
    is rounded correctly anyway.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        dtypes = {leaf.dtype for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        exact_already = func.is_view or func._schema.is_mutable or kwargs.get("dtype") is not None
        if exact_already or torch.float32 not in dtypes or torch.float64 in dtypes:
            return func(*args, **kwargs)
        args, kwargs = tree_map_only(torch.Tensor, _widened, (args, kwargs))
        return tree_map_only(torch.Tensor, _rounded, func(*args, **kwargs))


def _widened(x: torch.Tensor) -> torch.Tensor:
    return x.double() if x.dtype == torch.float32 else x


def _rounded(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype == torch.float64 else x


def cache_name(model: Any) -> str:
    """Returns the name of the argument, and of the field of the results, with which a model passes its cache. The name
    is "cache", "past_key_values" or "cache_params".
    """
    taken = inspect.signature(model.forward).parameters
    return next(name for name in ("cache", "past_key_values", "cache_params") if name in taken)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns the largest absolute difference between `a` and `b`, relative to the standard deviation of `b`."""
    return float((a.double() - b).abs().max() / b.std())
