"""Tiny random checkpoints of families that transformers defines. Their weights are large, so that the features of a
family have a visible effect on the logits.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from engine.tiny import BOS_ID, EOS_ID, VOCAB_SIZE, write_tokenizer

STD = 0.3
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
"""Settings of all families, except for the keys in `Animal.without`. transformers maps these names to the names that a
family uses.
"""
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
WINDOW: dict[str, Any] = {"sliding_window": 24}
MIXED: dict[str, Any] = {
    **WINDOW,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
}


@dataclass(frozen=True)
class Animal:
    """The family and the special settings of a checkpoint."""

    model_type: str
    changes: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    """The keys of COMMON that the family does not have."""
    scaled: dict[str, float] = field(default_factory=dict)
    """The factors of the random weights of some parameters. A key is a part of a parameter's name."""


HEADS = ("num_key_value_heads",)
MAMBA2: dict[str, Any] = {"mamba_n_heads": 16, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 2}
DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
STATE_ONLY = ("num_key_value_heads", "num_attention_heads", "max_position_embeddings", "intermediate_size")
"""Keys that models without attention do not have."""
ZOO: dict[str, Animal] = {
    "apertus": Animal("apertus"),
    "arcee": Animal("arcee"),
    "bamba": Animal("bamba", {**MAMBA2, "attn_layer_indices": [1]}),
    "cohere": Animal("cohere", {"logit_scale": 0.25}),
    "cohere2": Animal("cohere2", {**MIXED, "logit_scale": 0.25}),
    "deepseek-v3": Animal(
        "deepseek_v3",
        {
            "kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "first_k_dense_replace": 1,
            "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "num_key_value_heads": 4,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64,
                "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
            },
        },
    ),
    "ernie4_5": Animal("ernie4_5"),
    "exaone4": Animal("exaone4", MIXED),
    "falcon-h1": Animal("falcon_h1", {**MAMBA2, "mamba_d_ssm": 128, "ssm_in_multiplier": 0.8}),
    "falcon-mamba": Animal("falcon_mamba", {"state_size": 8, "time_step_rank": 8}, without=STATE_ONLY),
    "gemma": Animal("gemma", {"head_dim": 16}),
    "gemma2": Animal(
        "gemma2",
        {**MIXED, "head_dim": 16, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0},
        scaled={"q_proj": 3.0},
    ),
    "gemma3": Animal("gemma3_text", {**MIXED, "head_dim": 16}),
    "glm": Animal("glm", {"head_dim": 16}),
    "glm4": Animal("glm4", {"head_dim": 16}),
    "gpt2": Animal("gpt2", without=HEADS),
    "gpt-neox": Animal("gpt_neox", without=HEADS),
    "gptj": Animal("gptj", {"rotary_dim": 8}, without=("num_key_value_heads", "intermediate_size")),
    "gpt-oss": Animal(
        "gpt_oss", {**MIXED, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}, scaled={"sinks": 8.0}
    ),
    "granite": Animal("granite", {"attention_multiplier": 0.3, "logits_scaling": 4.0, "residual_multiplier": 0.5}),
    "granitemoe": Animal("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "granite-hybrid": Animal(
        "granitemoehybrid",
        {
            **MAMBA2, "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["mamba", "attention", "mamba"],
            "shared_intermediate_size": 64,
        },
    ),
    "helium": Animal("helium", {"head_dim": 16}),
    "hunyuan": Animal("hunyuan_v1_dense", {"head_dim": 16}),
    "jamba": Animal(
        "jamba",
        {
            "num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 3, "attn_layer_offset": 1,
            "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 8,
            "use_mamba_kernels": False,
        },
    ),
    "lfm2": Animal("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
    "lfm2-moe": Animal("lfm2_moe", {**MOE, "layer_types": ["conv", "full_attention", "conv"]}),
    "llama": Animal("llama"),
    "mamba": Animal("mamba", {"state_size": 8, "time_step_rank": 8}, without=STATE_ONLY),
    "mamba2": Animal("mamba2", {"num_heads": 16, "head_dim": 8, "state_size": 16, "n_groups": 2}, without=STATE_ONLY),
    "mistral-window": Animal("mistral", WINDOW),
    "mixtral": Animal("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "nemotron": Animal("nemotron"),
    "nemotron-h": Animal(
        "nemotron_h",
        {
            "mamba_num_heads": 16, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2, "head_dim": 16,
            "hybrid_override_pattern": "M*-M", "num_hidden_layers": 4,
        },
    ),
    "olmo": Animal("olmo"),
    "olmo2": Animal("olmo2"),
    "olmo3": Animal("olmo3", MIXED),
    "olmo-hybrid": Animal("olmo_hybrid", DELTA),
    "olmoe": Animal("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "persimmon": Animal("persimmon", without=HEADS),
    "phi": Animal("phi"),
    "phi3": Animal("phi3", WINDOW),
    "phi3-longrope": Animal(
        "phi3",
        {
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8,
                "long_factor": [1.0 + 0.5 * i for i in range(8)], "original_max_position_embeddings": 64,
            },
        },
    ),
    "phimoe": Animal("phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-mixed": Animal("qwen2", {**MIXED, "use_sliding_window": True}),
    "qwen2-moe": Animal("qwen2_moe", {**MOE, "shared_expert_intermediate_size": 64}),
    "qwen3": Animal("qwen3", {"head_dim": 16}),
    "qwen3-moe": Animal("qwen3_moe", {**MOE, "head_dim": 16}),
    "qwen3.5": Animal("qwen3_5_text", {**DELTA, "head_dim": 16}),
    "qwen3-next": Animal(
        "qwen3_next",
        {**MOE, **DELTA, "head_dim": 16, "shared_expert_intermediate_size": 64},
    ),
    "seed-oss": Animal("seed_oss", {"head_dim": 16}),
    "smollm3": Animal("smollm3"),
    "stablelm": Animal("stablelm"),
    "starcoder2": Animal("starcoder2", WINDOW),
}  # fmt: skip
REFUSED: dict[str, Animal] = {
    "bloom": Animal("bloom", without=("num_key_value_heads", "intermediate_size", "max_position_embeddings")),
    "falcon": Animal("falcon", without=("num_key_value_heads", "intermediate_size")),
    "falcon-alibi": Animal("falcon", {"alibi": True}, without=("num_key_value_heads", "intermediate_size")),
    "kimi-linear": Animal("kimi_linear"),
    "minimax": Animal(
        "minimax",
        {**MOE, "num_local_experts": 4, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    ),
    "mpt": Animal("mpt", without=("num_key_value_heads", "intermediate_size")),
    "recurrent-gemma": Animal("recurrent_gemma", {"lru_width": 64}),
    "rwkv": Animal("rwkv", without=STATE_ONLY),
}


def make_foreign(directory: str | Path, animal: Animal, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Writes the checkpoint of an `Animal` with a tokenizer, and returns its directory. Equal arguments give equal
    weights.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    path = Path(directory)
    settings = {name: value for name, value in COMMON.items() if name not in animal.without} | animal.changes
    config = AutoConfig.for_model(animal.model_type, **settings)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                factor = next((f for key, f in animal.scaled.items() if key in name), 1.0)
                values = torch.randn(parameter.shape) * STD * factor
                is_norm = "norm" in name.lower() or "ln_" in name or "layernorm" in name.lower()
                if is_norm and name.endswith("weight"):
                    zero_centred = float(parameter.float().mean()) == 0.0  # Gemma adds one to it
                    values = values / 3 + (0.0 if zero_centred else 1.0)
                parameter.copy_(values)
    model.save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps({"bos_token_id": BOS_ID, "eos_token_id": EOS_ID}))
    write_tokenizer(path)
    return path
