"""`looseleaf plan` prints the numbers of the papers, for models of which only the config is stored here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.tiny import make_checkpoint
from looseleaf.cli import main
from testing.quantized import FORMATS, make_quantized
from testing.zoo import ZOO, make_foreign

OPT_13B = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "vocab_size": 50272, "hidden_size": 5120,
    "ffn_dim": 20480, "num_hidden_layers": 40, "num_attention_heads": 40, "max_position_embeddings": 2048,
    "word_embed_proj_dim": 5120, "dtype": "float16",
}  # fmt: skip


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) == 0
    return capsys.readouterr().out


def test_opt_13b_as_in_the_paper(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """819,200 bytes per token, and 1.6 GB for 2,048 tokens (PagedAttention, section 3)."""
    (tmp_path / "config.json").write_text(json.dumps(OPT_13B))
    said = planned(capsys, str(tmp_path), "--dtype", "float16", "--memory", "40", "--sequences", "20")
    assert "2 x 40 layers x 40 KV heads x 128 x 2 bytes = 819,200 bytes a token" in said
    assert "2,048 tokens / 16 = 128 blocks of 13,107,200 bytes" in said
    assert "1.56 GiB a sequence, x 20 = 31.25 GiB" in said
    assert "at least 128 + 129 = 257 blocks = 3.14 GiB" in said
    assert "12,853,473,280 parameters x 2 bytes = 23.94 GiB" in said
    assert "room for 10 such sequences; hosts for 20: 2" in said
    assert "sends 1.56 GiB for such a prompt, at most once: 13.4 s at 1 Gbit/s, 1.34 s at 10 Gbit/s" in said


def test_a_million_tokens_of_llama_8b(capsys: pytest.CaptureFixture[str]) -> None:
    model = str(Path(__file__).parents[2] / "models/configs/llama-3.1-8b")
    said = planned(capsys, model, "--context", "1M", "--memory", "141", "--device", "cpu")
    assert "131,072 bytes a token" in said and "16,384 blocks of 8,388,608 bytes" in said
    assert "128.00 GiB a sequence" in said and "the model has 131,072 positions" in said
    assert "too little for one such sequence" in said
    assert "room for 1 such sequences" in planned(capsys, model, "--context", "1M", "--memory", "160")
    half = planned(capsys, model, "--context", "1M", "--memory", "141", "--kv-cache-dtype", "fp8_e4m3")
    assert "64.00 GiB a sequence" in half and "room for 1 such sequences" in half
    scaled = planned(capsys, model, "--context", "1M", "--memory", "141", "--kv-cache-dtype", "int8")
    assert "2 x 32 layers x 8 KV heads x (128 x 1 bytes + 4 of a scale) = 67,584 bytes a token" in scaled
    assert "66.00 GiB a sequence" in scaled
    assert "65,536 blocks of 2,097,152 bytes" in planned(capsys, model, "--context", "1M", "--device", "cuda")


def test_parameters_are_those_of_the_files_or_of_the_definition(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("gemma2", "mixtral", "phi3", "qwen3-moe", "glm4")
    made = [make_foreign(tmp_path / name, ZOO[name]) for name in names]
    for directory in (make_checkpoint(tmp_path / "llama"), *made):
        with_files = planned(capsys, str(directory), "--memory", "8")
        (directory / "model.safetensors").unlink()
        assert planned(capsys, str(directory), "--memory", "8") == with_files


def test_states_take_the_same_memory_at_any_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each of 24 layers stores 24 heads x 128 x 64 numbers for its recurrence and 3 x 1,792 for its convolution."""
    model = str(Path(__file__).parents[2] / "models/configs/mamba2-130m")
    said = planned(capsys, model, "--context", "1K", "--memory", "8")
    each = 4 * (24 * 128 * 64 + 3 * 1792)
    assert "24 layers, no attention" in said and f"states   1 x 24 layers x {each:,} bytes, at any length" in said
    assert f"1 block of {24 * each:,} bytes; one is cached for every 256 tokens" in said
    longer = planned(capsys, model, "--context", "32K", "--memory", "8")
    assert "18.5 MiB a sequence" in said and longer == said
    hybrid = make_foreign(tmp_path, ZOO["bamba"])
    said = planned(capsys, str(hybrid), "--memory", "8")
    assert "KV       1 x full attention" in said and "512 tokens / 256 = 2 blocks of" in said
    assert "states   1 x 2 layers x" in said, "keys and values of 128 tokens would take less than they do"


def test_quantized_weights_take_what_their_files_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_quantized(tmp_path / "four", tmp_path / "twin", FORMATS["gptq-4"])
    said = [planned(capsys, str(tmp_path / name), "--dtype", "float32") for name in ("four", "twin")]
    parameters = [line.split()[1] for text in said for line in text.splitlines() if line.startswith("weights")]
    assert parameters[0] == parameters[1] and "parameters, quantized = " in said[0]
    assert "parameters x 4 bytes" in said[1]


def test_a_wrong_length_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", str(make_checkpoint(tmp_path)), "--context", "1G"])
    assert "context" in capsys.readouterr().err
