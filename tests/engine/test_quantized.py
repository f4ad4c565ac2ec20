"""Quantized weights: every format compared with transformers in fp32, rounding at load, rejected formats."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint import fingerprint
from engine.config import Family, ModelConfig
from engine.errors import ModelError, UnsupportedModel
from engine.model_runner import ModelRunner, RunnerSettings
from engine.models.decoder import Decoder
from engine.tiny import make_checkpoint
from kernels.cpu import fallbacks
from kernels.quantization import quantize
from testing.oracle import Oracle
from testing.quantized import FORMATS, Format, make_quantized
from testing.zoo import ZOO, make_foreign

NEAR = 5e-5
"""The tolerance of fp32 logits relative to transformers in float64, as a fraction of the logits' standard deviation.
With these weights, transformers in fp32 differs by 2e-5 to 3e-5.
"""


def reference_logits(directory: Path, tokens: list[int], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Returns the logits of transformers."""
    from transformers import AutoModelForCausalLM

    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, **how).eval()
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


def runner_of(directory: Path, **how: Any) -> ModelRunner:
    return ModelRunner(RunnerSettings(directory, **({"dtype": "float32", "num_threads": 1, "device": "cpu"} | how)))


def prompt(length: int) -> list[int]:
    return torch.randint(5, 512, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def distance(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return float((ours - reference).abs().max() / reference.std())


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_gives_the_logits_of_the_same_numbers(name: str, tmp_path: Path) -> None:
    make_quantized(tmp_path / "quantized", tmp_path / "twin", FORMATS[name], seed=5)
    runner = runner_of(tmp_path / "quantized")
    tokens = prompt(120)
    assert distance(Oracle(runner).logits(tokens, chunk=24), reference_logits(tmp_path / "twin", tokens)) < NEAR
    assert isinstance(runner.model, Decoder)
    kind = "simd" if "f" in name.split("-")[0] else "int8" if name in ("gptq-8", "int-quantized") else "int4"
    assert {runner.model.layers[1].qkv.how, runner.model.layers[1].mlp.linears[1].how} == {kind}
    if kind != "simd":
        whole = sum(t.numel() * 4 for t in load_file(tmp_path / "twin" / "model.safetensors").values())
        assert runner.weights_bytes < 0.55 * whole  # the embedding and the output matrix are not quantized


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral", "gemma2", "phi3", "mixtral"])
def test_formats_serve_all_families(family: Family, tmp_path: Path) -> None:
    make_quantized(tmp_path / "quantized", tmp_path / "twin", FORMATS["awq"], family, seed=2)
    tokens = prompt(60)
    ours = Oracle(runner_of(tmp_path / "quantized")).logits(tokens)
    assert distance(ours, reference_logits(tmp_path / "twin", tokens)) < NEAR


@pytest.mark.parametrize("family", ["llama", "qwen2", "opt"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rounding_on_load_gives_the_logits_of_the_rounded_weights(
    family: Family, quantization: Any, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, family, seed=4)
    tokens = prompt(90)
    ours = Oracle(runner_of(tmp_path, quantization=quantization)).logits(tokens)
    unrounded = reference_logits(tmp_path, tokens)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and "embed" not in name:
            tensors[name] = quantize(tensor, 4 if quantization == "int4" else 8).dequantized(torch.float32)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    if family == "opt":  # its output matrix is the embedding, and only this use of it is rounded
        return
    assert distance(ours, reference_logits(tmp_path, tokens)) < NEAR < 1e-3 < distance(ours, unrounded)


def test_a_pass_in_one_call_has_the_bits_of_many_calls(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", seed=1)
    for quantization in ("int8", "int4"):
        for dtype in ("float32", "bfloat16"):
            how = {"quantization": quantization, "dtype": dtype}
            fused, eager = (runner_of(tmp_path, enforce_eager=each, **how) for each in (False, True))
            fused.bind(fused.new_arena(4))
            assert fused.binding.fused is not None
            tokens = prompt(50)
            assert torch.equal(Oracle(fused).logits(tokens), Oracle(eager).logits(tokens, chunk=7))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_experts_are_rounded_and_routers_are_not(impl: Any, quantization: Any, tmp_path: Path) -> None:
    make_foreign(tmp_path, ZOO["mixtral"], seed=3)
    tokens = prompt(40)
    ours = Oracle(runner_of(tmp_path, quantization=quantization, model_impl=impl)).logits(tokens)
    unrounded = reference_logits(tmp_path, tokens, torch.float32)  # its experts do not support float64
    tensors = load_file(tmp_path / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and "embed" not in name and not name.endswith("gate.weight"):
            tensors[name] = quantize(tensor, 4 if quantization == "int4" else 8).dequantized(torch.float32)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    rounded = reference_logits(tmp_path, tokens, torch.float32)
    assert distance(ours, rounded) < 2 * NEAR < 1e-3 < distance(ours, unrounded)


def test_workers_with_other_weights_share_no_blocks(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    numerics = {q: runner_of(tmp_path, quantization=q).numerics for q in (None, "int8", "int4")}
    assert len(set(numerics.values())) == 3
    assert "weights=" not in numerics[None]
    make_quantized(tmp_path / "quantized", tmp_path / "twin", FORMATS["gptq-4"])
    prints = {fingerprint(tmp_path / name, "float32", "auto") for name in ("quantized", "twin")}
    assert len(prints) == 2


def changed(form: Format, **config: Any) -> Format:
    return replace(form, config=form.config | config)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (changed(FORMATS["gptq-4"], bits=3), r"gptq\): bits=3 is not supported; supported: 4, 8"),
        (changed(FORMATS["awq"], version="gemv"), r"awq\): version=gemv is not supported"),
        (
            changed(FORMATS["fp8"], quant_method="bitsandbytes"),
            r"\(bitsandbytes\) is not supported; only gptq",
        ),
        (changed(FORMATS["pack-quantized"], format="nvfp4-pack"), "format=nvfp4-pack is not supported"),
        (changed(FORMATS["pack-quantized"], config_groups={}), "0 config_groups; only one is supported"),
    ],
)
def test_what_is_not_read_is_refused_by_name(form: Format, said: str, tmp_path: Path) -> None:
    make_quantized(tmp_path / "quantized", tmp_path / "twin", form)
    with pytest.raises(UnsupportedModel, match=said):
        ModelConfig.from_directory(tmp_path / "quantized")


def test_groups_in_another_order_are_refused(tmp_path: Path) -> None:
    make_quantized(tmp_path / "quantized", tmp_path / "twin", FORMATS["gptq-4"])
    file = tmp_path / "quantized" / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.down_proj.g_idx"
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, file)
    with pytest.raises(UnsupportedModel, match=rf"{name.removesuffix('.g_idx')}.g_idx is not in order \(desc_act\)"):
        runner_of(tmp_path / "quantized")


@pytest.mark.parametrize(
    ("tensor", "said"), [("scales", "has shape"), ("qweight", "has shape"), (None, "lacks tensor")]
)
def test_a_damaged_layer_is_named(tensor: str | None, said: str, tmp_path: Path) -> None:
    make_quantized(tmp_path / "quantized", tmp_path / "twin", FORMATS["gptq-4"])
    file = tmp_path / "quantized" / "model.safetensors"
    tensors = load_file(file)
    name = f"model.layers.0.self_attn.o_proj.{tensor or 'qzeros'}"
    tensors[name] = tensors[name][:1].contiguous()
    if tensor is None:
        del tensors[name]
    save_file(tensors, file)
    with pytest.raises(ModelError, match=said) as error:
        runner_of(tmp_path / "quantized")
    assert name in str(error.value)


def test_a_quantized_checkpoint_is_not_rounded_again(tmp_path: Path) -> None:
    make_quantized(tmp_path / "quantized", tmp_path / "twin", FORMATS["awq"])
    with pytest.raises(ModelError, match="quantization int8 is for checkpoints that are not quantized"):
        runner_of(tmp_path / "quantized", quantization="int8")


def test_families_without_an_implementation_of_ours_are_refused(tmp_path: Path) -> None:
    make_foreign(tmp_path, ZOO["glm4"])
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": FORMATS["awq"].config}))
    with pytest.raises(UnsupportedModel, match=r"quantization_config \(awq\) needs a native implementation"):
        ModelConfig.from_directory(tmp_path)


def test_layers_of_which_only_some_are_quantized_are_joined_as_floats(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """For example, a checkpoint may list q_proj in `ignore`."""
    make_quantized(tmp_path / "quantized", tmp_path / "twin", FORMATS["gptq-4"], seed=9)
    file, twin = tmp_path / "quantized" / "model.safetensors", load_file(tmp_path / "twin" / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj."
    tensors = {key: each for key, each in load_file(file).items() if not key.startswith(name)}
    save_file(tensors | {f"{name}weight": twin[f"{name}weight"]}, file)
    before = fallbacks().get("quantized linear", 0)
    with caplog.at_level(logging.WARNING, "looseleaf.kernels"):
        runner = runner_of(tmp_path / "quantized")
    assert fallbacks()["quantized linear"] == before + 1
    tokens = prompt(30)
    assert distance(Oracle(runner).logits(tokens), reference_logits(tmp_path / "twin", tokens)) < NEAR
