"""GGUF files: blocks compared with the gguf package, models compared with transformers, rejected files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from engine.checkpoint import fingerprint, weight_files
from engine.config import Family
from engine.errors import ModelError, UnsupportedModel
from engine.gguf_blocks import DECODERS
from engine.gguf_file import LLAMA3, make_directory
from engine.model_runner import ModelRunner, RunnerSettings
from engine.models.decoder import Decoder
from testing.gguf_files import make_gguf, random_blocks
from testing.oracle import Oracle

NEAR = 5e-5
"""The tolerance of fp32 logits relative to transformers in float64, as a fraction of the logits' standard deviation."""
MIXED = {"attn_v": Type.Q6_K, "ffn_down": Type.Q6_K, "token_embd": Type.Q6_K, "attn": Type.Q4_K, "ffn": Type.Q4_K}
"""The types of llama.cpp's Q4_K_M."""
MODELS: dict[str, tuple[Family, dict[str, Type], dict[str, Any]]] = {
    "llama-q8_0": ("llama", {}, {}),
    "llama-q4_0": ("llama", {"blk": Type.Q4_0}, {}),
    "llama-q4_k_m": ("llama", MIXED, {}),
    "llama-tied": ("llama", {"blk": Type.Q4_1}, {"tie_word_embeddings": True}),
    "qwen2-q4_0": ("qwen2", {"blk": Type.Q4_0}, {}),
    "qwen3-f16": ("qwen3", {"blk": Type.F16, "token": Type.BF16}, {}),
    "qwen3-q5_1": ("qwen3", {"ffn": Type.Q5_1}, {}),
}


@pytest.mark.parametrize("kind", DECODERS, ids=lambda kind: Type(kind).name)
def test_blocks_stand_for_the_numbers_that_gguf_says(kind: int) -> None:
    blocks = random_blocks(Type(kind), 6, 1024, seed=kind)
    want = torch.from_numpy(gguf.dequantize(blocks, Type(kind)))
    found = DECODERS[kind](torch.from_numpy(blocks)).dequantized(torch.float64)
    assert found.shape == (6, 1024) and len(want.unique()) > 100
    assert (found - want).abs().max() <= 1e-6 * want.abs().max()


def prompt(length: int) -> list[int]:
    return torch.randint(5, 512, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def reference_logits(directory: Path, tokens: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, attn_implementation="eager").eval()
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


def runner_of(directory: Path, **how: Any) -> ModelRunner:
    return ModelRunner(RunnerSettings(directory, dtype="float32", num_threads=1, device="cpu", **how))


@pytest.mark.parametrize("name", MODELS)
def test_a_file_gives_the_logits_of_the_same_numbers(name: str, tmp_path: Path) -> None:
    family, kinds, overrides = MODELS[name]
    make_gguf(tmp_path / "a.gguf", tmp_path / "twin", family, kinds, **overrides)
    make_directory(tmp_path / "a.gguf", tmp_path / "model")
    runner, tokens = runner_of(tmp_path / "model"), prompt(70)
    want = reference_logits(tmp_path / "twin", tokens)
    assert float((Oracle(runner).logits(tokens, chunk=16) - want).abs().max() / want.std()) < NEAR
    assert isinstance(runner.model, Decoder)
    layer = runner.model.layers[1]
    expected = {"llama-q8_0": "int8", "qwen3-f16": "simd", "qwen3-q5_1": "int8"}.get(name, "int4")
    assert layer.qkv.how == expected
    assert layer.mlp.linears[1].how == (
        "simd" if name in ("qwen3-f16", "qwen3-q5_1") else "int8" if "_m" in name else expected
    )


def test_the_tokenizer_is_the_files(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    make_gguf(tmp_path / "a.gguf", tmp_path / "twin", "qwen3", {})
    make_directory(tmp_path / "a.gguf", tmp_path / "model")
    ours, twin = (Tokenizer.from_file(str(tmp_path / name / "tokenizer.json")) for name in ("model", "twin"))
    for text in ("Once upon a time, the wolf", "über 3 Füchse\n\n  ran"):
        assert ours.encode(text, add_special_tokens=False).ids == twin.encode(text, add_special_tokens=False).ids
    assert json.loads((tmp_path / "model" / "generation_config.json").read_text())["eos_token_id"] == 2


def test_weights_stay_in_the_file_and_name_the_model(tmp_path: Path) -> None:
    make_gguf(tmp_path / "a.gguf", tmp_path / "twin", "llama", {})
    make_directory(tmp_path / "a.gguf", tmp_path / "model")
    assert (tmp_path / "model" / "model.gguf").resolve() == tmp_path / "a.gguf"
    [file] = weight_files(tmp_path / "model")
    assert file.tensors["model.layers.0.mlp.down_proj.weight"][:2] == ("Q8_0", (256, 512))
    before = fingerprint(tmp_path / "model", "float32", "auto")
    begin = file.data_start + file.tensors["model.layers.0.mlp.down_proj.weight"][2]
    with (tmp_path / "a.gguf").open("r+b") as stream:
        stream.seek(begin + 20)
        byte = stream.read(1)[0]
        stream.seek(begin + 20)
        stream.write(bytes([byte ^ 1]))
    assert fingerprint(tmp_path / "model", "float32", "auto") != before


def with_factors(file: Path, twin: Path, factors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes a Llama like `make_gguf`, with the additional tensor rope_freqs.weight."""
    write = gguf.GGUFWriter.write_header_to_file

    def first(self: gguf.GGUFWriter, *args: Any) -> None:
        self.add_tensor("rope_freqs.weight", factors.astype(np.float32))
        write(self, *args)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", first)
    scaling = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, **LLAMA3}
    make_gguf(file, twin, "llama", {}, rope_parameters=scaling)


def test_rope_factors_of_llama_3_are_known_and_others_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wavelengths = 2 * np.pi * 10_000.0 ** (np.arange(0, 64, 2) / 64)
    smooth = np.clip((8192 / wavelengths - 1) / 3, 0, 1)
    factors = 1 / ((1 - smooth) / 8 + smooth)
    assert 1 < len(set(factors.round(3))) < 32
    with_factors(tmp_path / "a.gguf", tmp_path / "twin", factors, monkeypatch)
    make_directory(tmp_path / "a.gguf", tmp_path / "model")
    runner, tokens = runner_of(tmp_path / "model"), prompt(70)
    assert runner.config.rope is not None and runner.config.rope.kind == "llama3"
    want = reference_logits(tmp_path / "twin", tokens)
    assert float((Oracle(runner).logits(tokens) - want).abs().max() / want.std()) < NEAR
    monkeypatch.undo()
    with_factors(tmp_path / "b.gguf", tmp_path / "other", factors[::-1].copy(), monkeypatch)
    with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight is not Llama 3's rope scaling"):
        make_directory(tmp_path / "b.gguf", tmp_path / "b")


def test_what_is_no_gguf_file_or_of_another_architecture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(ModelError, match=r"bad\.gguf cannot be read as a GGUF file"):
        make_directory(tmp_path / "bad.gguf", tmp_path / "model")
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=r"other\.gguf|GGUF files of mamba are not supported"):
        make_directory(tmp_path / "other.gguf", tmp_path / "model")
    assert not (tmp_path / "model" / "config.json").exists()
