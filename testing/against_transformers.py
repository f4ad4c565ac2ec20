"""For tests: the logits that the transformers library computes for a checkpoint, and their distance from ours."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch

from engine.model_runner import ModelRunner, RunnerSettings

NUM_TOKENS = 150


def runner_of(directory: Path, **settings: Any) -> ModelRunner:
    """Loads the checkpoint in fp32 on the CPU, with the definition of transformers unless the settings differ."""
    given: dict[str, Any] = {
        "dtype": "float32",
        "model_impl": "transformers",
        "num_threads": 2,
        "device": "cpu",
        "block_size": 16,
    }
    return ModelRunner(RunnerSettings(directory, **(given | settings)))


def prompt(vocab_size: int, length: int = NUM_TOKENS) -> list[int]:
    """Returns random tokens of a vocabulary. The same arguments give the same tokens."""
    return torch.randint(5, vocab_size, (length,), generator=torch.Generator().manual_seed(1)).tolist()


def by_transformers(
    directory: Path, tokens: list[int], dtype: torch.dtype = torch.float32, *, one_by_one: bool = False
) -> torch.Tensor:
    """Returns float64 [T, vocab]: the logits of one pass over all tokens, or of one pass for each token with
    transformers' cache.
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


def cache_name(model: Any) -> str:
    """Returns what the model calls its cache, as an argument and in its results: "cache" since transformers 5.24,
    "past_key_values" or "cache_params" before.
    """
    taken = inspect.signature(model.forward).parameters
    return next(name for name in ("cache", "past_key_values", "cache_params") if name in taken)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns the largest difference, relative to the standard deviation of `b`."""
    return float((a.double() - b).abs().max() / b.std())
