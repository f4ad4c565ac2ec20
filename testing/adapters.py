"""Writes random LoRA adapters in PEFT's format for tests and benchmarks, and checkpoints with merged adapters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from common.adapters import CONFIG_FILE, WEIGHTS_FILE, read_config

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(
    directory: Path, model: Path, *, rank: int = 4, seed: int = 1, targets: Sequence[str] = ALL, std: float = 0.2,
    **overrides: Any,
) -> Path:  # fmt: skip
    """Writes a random adapter for the model's linear layers whose last name component is in `targets`. `std` is the
    standard deviation of the matrices' elements. `overrides` are keys of adapter_config.json. Returns `directory`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(model), "r": rank,
        "lora_alpha": 2 * rank, "target_modules": list(targets), "bias": "none", "lora_dropout": 0.0,
        "inference_mode": True, "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {},
    }  # fmt: skip
    (directory / CONFIG_FILE).write_text(json.dumps(config | overrides))
    of_module, generator = read_config(directory), torch.Generator().manual_seed(seed)
    tensors = {}
    for module, weight in _matrices(model).items():
        if module.rpartition(".")[2] in targets:
            r, (n_out, n_in) = of_module.rank_of(module), weight.shape
            for letter, shape in (("A", (r, n_in)), ("B", (n_out, r))):
                name = f"base_model.model.{module}.lora_{letter}.weight"
                tensors[name] = torch.randn(shape, generator=generator) * std
    save_file(tensors, directory / WEIGHTS_FILE)
    return directory


def merge(directory: Path, model: Path, adapter: Path) -> Path:
    """Writes a copy of the model to `directory`, which must not exist, with the adapter's scale * B A added to the
    weights. The sums are computed in float64 and rounded to the weights' dtype. Returns `directory`.
    """
    directory.mkdir(parents=True)
    for file in model.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    tensors, low = load_file(model / "model.safetensors"), load_file(adapter / WEIGHTS_FILE)
    config = read_config(adapter)
    for module in _matrices(model):
        at = f"base_model.model.{module}.lora_"
        if f"{at}A.weight" in low:
            product = low[f"{at}B.weight"].double() @ low[f"{at}A.weight"].double() * config.scale_of(module)
            weight = tensors[f"{module}.weight"]
            tensors[f"{module}.weight"] = (weight.double() + product).to(weight.dtype)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _matrices(model: Path) -> Mapping[str, torch.Tensor]:
    tensors = load_file(model / "model.safetensors")
    return {
        name.removesuffix(".weight"): tensor
        for name, tensor in tensors.items()
        if ".layers." in name and tensor.dim() == 2
    }
