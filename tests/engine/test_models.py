"""All families and variants compared with transformers: greedy tokens in fp32, and logits in bf16 within a
tolerance.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import Family
from engine.model_runner import ModelRunner, RunnerSettings
from engine.tiny import make_checkpoint
from testing.against_transformers import cache_name
from testing.engine import Batch
from testing.oracle import Oracle

PROMPT_LENS = (1, 15, 16, 17, 700)
NEW_TOKENS = 200
TIE = 1e-4
"""The largest difference between the reference's best two logits with which either token may be sampled."""
FP32_TOLERANCE = 2e-3
BF16_RMS_TOLERANCE, BF16_MAX_TOLERANCE = 0.02, 0.15
"""Tolerances for bf16 logits compared with transformers in fp32 on the same weights, as fractions of the logits'
standard deviation. Measured: rms 0.005 to 0.013, maximum 0.03 to 0.09. transformers in bf16 differs by as much (0.005
to 0.013, 0.03 to 0.10)."""

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
VARIANTS: dict[str, tuple[Family, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "opt": ("opt", {}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3_text", {"attention_bias": True, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "phi3-partial": ("phi3", {"partial_rotary_factor": 0.5}),
    "qwen3-moe": ("qwen3_moe", {}),
    "mixtral": ("mixtral", {}),
    "mistral-window-64": ("mistral", {"sliding_window": 64}),
    "qwen2-all-layers-windowed": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0},
    ),
    "llama-biases-tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "qwen3-biases": ("qwen3", {"attention_bias": True, "head_dim": 32}),
    "opt-350m-like": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "opt-no-bias": ("opt", {"enable_bias": False}),
    "llama-rope-linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "llama-rope-llama3": ("llama", {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 256}}),
    "llama-rope-yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 512,
            }
        },
    ),
}


def reference_model(directory: Path) -> Any:
    """Returns transformers' model of a checkpoint in fp32. Checks that it loaded every tensor."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    return model.eval()


def prompt(length: int, seed: int = 7) -> list[int]:
    generator = torch.Generator().manual_seed(seed + length)
    return torch.randint(5, 512, (length,), generator=generator).tolist()


def one_pass(model: Any, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0]


def assert_greedy(reference: torch.Tensor, prompt_len: int, outputs: list[int]) -> None:
    """Checks that every output is the reference's choice after the same tokens, unless its best two logits are within
    TIE. By induction, the reference alone decodes the same tokens, up to the first tie.
    """
    rows = reference[prompt_len - 1 : prompt_len - 1 + len(outputs)]  # [new, vocab]
    best = rows.topk(2).values
    chosen = rows.gather(1, torch.tensor(outputs)[:, None])[:, 0]
    wrong = (chosen < best[:, 0]) & (best[:, 0] - chosen > TIE)
    assert not wrong.any(), f"output {int(wrong.nonzero()[0])} of prompt length {prompt_len} is not the reference's"
    ties = (best[:, 0] - best[:, 1] < TIE).sum()
    assert ties <= 3, "the shapes make ties: the comparison says nothing"


@pytest.mark.parametrize("name", VARIANTS)
@torch.inference_mode()
def test_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[name]
    make_checkpoint(tmp_path, family, seed=3, **overrides)
    runner = ModelRunner(RunnerSettings(tmp_path, dtype="float32", num_threads=1, deterministic=True))
    outputs = Batch.of(runner, [prompt(n) for n in PROMPT_LENS], NEW_TOKENS, budget=64).run()
    model = reference_model(tmp_path)
    for length, output in zip(PROMPT_LENS, outputs, strict=True):
        assert len(output) == NEW_TOKENS
        reference = one_pass(model, prompt(length) + output)
        assert_greedy(reference, length, output)
        ours = Oracle(runner).logits(prompt(length) + output).cpu()
        assert (ours - reference).abs().max() < FP32_TOLERANCE


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "opt"])
@torch.inference_mode()
def test_transformers_generate_gives_the_same_tokens(family: Family, tmp_path: Path) -> None:
    """Compares with the generation loop and the cache of transformers."""
    make_checkpoint(tmp_path, family, seed=4)
    runner = ModelRunner(RunnerSettings(tmp_path, dtype="float32", num_threads=1, deterministic=True))
    ids = prompt(17)
    outputs = Batch.of(runner, [ids], 64).run()[0]
    generated = reference_model(tmp_path).generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, 17), do_sample=False, min_new_tokens=64, max_new_tokens=64,
        eos_token_id=None,
    )  # fmt: skip
    assert outputs == generated[0, 17:].tolist()


@torch.inference_mode()
def test_dynamic_rope_gives_the_tokens_of_transformers_cached_decoding(tmp_path: Path) -> None:
    """Prompts are shorter than the trained length, which decoding exceeds. transformers then increases the base with
    every token.
    """
    rope = {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 1e4}
    make_checkpoint(tmp_path, "llama", seed=3, max_position_embeddings=64, rope_parameters=rope)
    runner = ModelRunner(RunnerSettings(tmp_path, dtype="float32", num_threads=1, deterministic=True))
    prompts = [prompt(17), prompt(60)]
    outputs = Batch.of(runner, prompts, 100).run()
    model = reference_model(tmp_path)
    cache = cache_name(model)
    for ids, output in zip(prompts, outputs, strict=True):
        out = model(torch.tensor([ids]), use_cache=True)
        rows = [out.logits[0, -1]]
        for position, token in enumerate(output[:-1], len(ids)):
            out = model(
                torch.tensor([[token]]),
                position_ids=torch.tensor([[position]]),
                **{cache: getattr(out, cache)},
            )
            rows.append(out.logits[0, -1])
        assert_greedy(torch.stack(rows), 1, output)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "opt"])
@torch.inference_mode()
def test_bf16_logits_are_near_transformers_fp32(family: Family, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family, seed=5, std=0.1, dtype=torch.bfloat16)
    tokens = prompt(300)
    reference = one_pass(reference_model(tmp_path), tokens)
    runner = ModelRunner(RunnerSettings(tmp_path, dtype="bfloat16", num_threads=1))
    difference = (Oracle(runner).logits(tokens, chunk=64).cpu() - reference) / reference.std()
    assert difference.square().mean().sqrt() < BF16_RMS_TOLERANCE
    assert difference.abs().max() < BF16_MAX_TOLERANCE
