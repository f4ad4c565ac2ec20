"""The model directories with only a config (for `--load-format dummy`): the engine can read them, and their sizes match
their names.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from engine.config import ModelConfig
from engine.foreign.model import num_parameters
from engine.tiny import parameter_shapes

CONFIGS = Path(__file__).resolve().parents[2] / "models" / "configs"
PARAMETERS = {
    "gemma3-120m": 121_297_536,
    "llama-125m": 124_668_672,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-8b": 8_030_261_248,
    "mamba2-130m": 128_989_632,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-moe-150m": 137_607_168,
}
"""Parameter counts (tied embeddings count once). They are those of published checkpoints, except for gemma3-120m and
qwen3-moe-150m, which are smaller variants.
"""


@pytest.mark.parametrize("name", PARAMETERS)
def test_sizes(name: str) -> None:
    config = ModelConfig.from_directory(CONFIGS / name)
    if config.family == "transformers":
        assert num_parameters(CONFIGS / name) == PARAMETERS[name]
    else:
        assert sum(math.prod(shape) for _, shape in parameter_shapes(config)) == PARAMETERS[name]
    assert config.eos_token_ids


def test_every_entry_is_known() -> None:
    assert {path.name for path in CONFIGS.iterdir() if path.is_dir()} == set(PARAMETERS)
