"""Makes draft models of the first layers of a model, with the same embeddings, head and tokenizer. Nobody has trained
them: they predict some of the model's tokens, and take less time.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from engine.tiny import make_checkpoint

WEIGHTS = "model.safetensors"


def first_layers(model: Path, directory: Path, num_layers: int) -> Path:
    """Writes the first `num_layers` layers of a Llama-like model in one safetensors file, and returns `directory`. A
    model without weights needs only a config.json, because dummy weights depend on their names.
    """
    directory.mkdir(parents=True)
    config = json.loads((model / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (model / name).exists():
            shutil.copy(model / name, directory / name)
    if (model / WEIGHTS).exists():
        kept = {name: tensor for name, tensor in load_file(model / WEIGHTS).items() if _layer(name) < num_layers}
        save_file(kept, directory / WEIGHTS, metadata={"format": "pt"})
    return directory


def with_weak_layers(config: Path, directory: Path, first: int, factor: float) -> Path:
    """Writes a random Llama with the shape in the directory `config`. What its layers from `first` on add to the hidden
    states is multiplied by `factor`, so that its first layers predict a part of its tokens. Returns `directory`.
    """
    shape = json.loads((config / "config.json").read_text())
    make_checkpoint(directory, "llama", seed=1, std=0.02, dtype=torch.bfloat16, **shape)
    tensors = load_file(directory / WEIGHTS)
    for name, tensor in tensors.items():
        if _layer(name) >= first and name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = tensor * factor
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    return directory


def _layer(name: str) -> int:
    """Returns the layer of a tensor, or -1 for the embeddings, the last norm and the head."""
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] else -1
