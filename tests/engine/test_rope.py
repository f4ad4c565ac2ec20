"""Every kind of rotary positions, compared with transformers at lengths for which the scaling matters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import ModelConfig
from engine.tiny import make_checkpoint
from testing.against_transformers import by_transformers, distance, prompt, runner_of
from testing.oracle import Oracle
from testing.zoo import ZOO, make_foreign

transformers = pytest.importorskip("transformers")
TRAINED = 64
"""The number of positions before scaling. The prompts have 150 tokens."""
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [1.0 + 0.5 * i for i in range(8)]}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 8.0},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": TRAINED
    },
    "yarn": {"factor": 8.0, "original_max_position_embeddings": TRAINED},
    "longrope": FACTORS | {"original_max_position_embeddings": TRAINED},
}  # fmt: skip
FAMILIES = {"native": "llama", "transformers": "olmo2"}
NATIVE = [(kind, "native") for kind in ROPES if kind != "longrope"]
CLOSE = 2e-5


def make(directory: Path, impl: str, **rope: Any) -> Path:
    animal = ZOO[FAMILIES[impl]]
    length = TRAINED if rope["rope_type"] in ("dynamic", "default") else 512
    changes = {"max_position_embeddings": length, "rope_parameters": {"rope_theta": 10_000.0} | rope}
    return make_foreign(directory, replace(animal, changes=animal.changes | changes))


def test_the_dynamic_scaling_of_hunyuan_is_that_of_its_alpha(tmp_path: Path) -> None:
    """Hunyuan's checkpoints use "dynamic" for a fixed scaling of the base."""
    rope = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 2.0, "rope_theta": 10_000.0}
    changes = {"max_position_embeddings": TRAINED, "rope_parameters": rope}
    directory = make_foreign(tmp_path, replace(ZOO["hunyuan"], changes=ZOO["hunyuan"].changes | changes))
    runner, tokens = runner_of(directory), prompt(512, 100)
    assert runner.max_model_len == 2 * TRAINED
    got, want = Oracle(runner).logits(tokens, chunk=24), by_transformers(directory, tokens, one_by_one=True)
    assert distance(got, want) <= CLOSE


@pytest.mark.parametrize(("kind", "impl"), [*NATIVE, *((kind, "transformers") for kind in ROPES)])
def test_scaled_positions_are_those_of_transformers(tmp_path: Path, kind: str, impl: str) -> None:
    """Dynamic NTK is compared with decoding in transformers, which rotates a key once, by the length at that time."""
    directory = make(tmp_path / "scaled", impl, rope_type=kind, **ROPES[kind])
    runner = runner_of(directory, model_impl=impl)
    assert runner.max_model_len >= {"linear": 2048, "dynamic": 8 * TRAINED}.get(kind, 512)
    tokens = prompt(runner.config.vocab_size)
    got = Oracle(runner).logits(tokens, chunk=24)
    want = by_transformers(directory, tokens, one_by_one=kind == "dynamic")
    exact = by_transformers(directory, tokens, torch.float64, one_by_one=kind == "dynamic")
    assert distance(got, want) <= max(CLOSE, 1.5 * distance(want, exact))

    plain = make(tmp_path / "plain", impl, rope_type="default")
    assert distance(got, by_transformers(plain, tokens)) > 0.01, "the scaling does not matter"


@pytest.mark.parametrize("impl", FAMILIES)
def test_dynamic_scaling_does_not_depend_on_chunks(tmp_path: Path, impl: str) -> None:
    """(In transformers it does: all keys of a longer prompt are rotated by the prompt's length.)"""
    directory = make(tmp_path, impl, rope_type="dynamic", **ROPES["dynamic"])
    oracle, tokens = Oracle(runner_of(directory, model_impl=impl)), prompt(512, 90)
    alone = oracle.logits(tokens, chunk=1)
    assert all(torch.equal(oracle.logits(tokens, chunk=chunk), alone) for chunk in (7, 90))
    whole = by_transformers(directory, tokens)
    assert distance(alone[:TRAINED], whole[:TRAINED]) > 0.01, "the keys of a prompt depend on its length there"


def test_three_positions_of_text_are_one(tmp_path: Path) -> None:
    """Qwen2-VL rotates parts of a head by the three positions of an image patch, which are equal for a text token."""
    rope = {"type": "mrope", "mrope_section": [2, 3, 3]}
    make_checkpoint(tmp_path, "qwen2", seed=3, rope_scaling=rope)
    tokens = prompt(512)
    got = Oracle(runner_of(tmp_path, model_impl="native")).logits(tokens, chunk=24)
    ours = ModelConfig.from_directory(tmp_path)
    text = transformers.Qwen2VLTextConfig(
        vocab_size=ours.vocab_size, hidden_size=ours.hidden_size, intermediate_size=ours.intermediate_size,
        num_hidden_layers=ours.num_layers, num_attention_heads=ours.num_heads, num_key_value_heads=ours.num_kv_heads,
        rms_norm_eps=ours.norm_eps, rope_parameters=rope | {"rope_type": "default", "rope_theta": 10_000.0},
    )  # fmt: skip
    from safetensors.torch import load_file
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLTextModel

    model, tensors = Qwen2VLTextModel(text).eval(), load_file(tmp_path / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): t for name, t in tensors.items() if name != "lm_head.weight"})
    with torch.inference_mode():
        hidden = model(torch.tensor([tokens])).last_hidden_state[0]
    assert distance(got, (hidden @ tensors["lm_head.weight"].T).double()) <= CLOSE


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_may_change_in_some_layers_alone(tmp_path: Path, kind: str) -> None:
    """Full attention is scaled, and sliding windows are not. The table depends on the position, not on the forward
    pass.
    """

    def gemma3(name: str, **full: Any) -> Path:
        ropes = {"sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}, "full_attention": full}
        length = 512 if kind == "longrope" else TRAINED
        changes = ZOO["gemma3"].changes | {"max_position_embeddings": length, "rope_parameters": ropes}
        return make_foreign(tmp_path / name, replace(ZOO["gemma3"], changes=changes))

    directory = gemma3("scaled", rope_type=kind, rope_theta=10_000.0, **ROPES[kind])
    runner, tokens = runner_of(directory), prompt(512, 100)
    assert runner.max_model_len == 512
    got = Oracle(runner).logits(tokens, chunk=24)
    assert torch.equal(Oracle(runner).logits(tokens, chunk=1), got)
    assert distance(got, by_transformers(directory, tokens, one_by_one=kind == "dynamic")) <= CLOSE
    plain = gemma3("plain", rope_type="default", rope_theta=10_000.0)
    assert distance(got, by_transformers(plain, tokens)) > 0.01, "the scaling does not matter"
