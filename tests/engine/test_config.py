"""`ModelConfig`: sizes, errors, and settings that change the results, which are applied or refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from common.types import KvKind
from engine.config import Family, ModelConfig
from engine.errors import ModelError, UnsupportedModel
from engine.models.rope import attention_factor, cos_sin_table, inverse_frequencies
from engine.tiny import hf_config

OPT_13B = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": 50272,
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "ffn_dim": 20480,
    "max_position_embeddings": 2048,
    "word_embed_proj_dim": 5120,
    "do_layer_norm_before": True,
    "torch_dtype": "float16",
}


def read(tmp_path: Path, raw: dict[str, Any]) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return ModelConfig.from_directory(tmp_path)


def test_opt_13b_needs_800_kib_of_kv_a_token(tmp_path: Path) -> None:
    config = read(tmp_path, OPT_13B)
    for dtype in ("float16", "bfloat16"):
        layout, _ = config.kv_groups(16, dtype)  # type: ignore[arg-type]
        assert layout.groups[0].bytes_per_token == 819_200
        assert 2048 // 16 * layout.block_bytes == 1.5625 * 2**30


def test_blocks_are_larger_on_cpus_for_long_sequences(tmp_path: Path) -> None:
    config = read(tmp_path, hf_config("llama"))
    sizes = {
        longest: [config.default_block_size("bfloat16", longest, on_cpu) for on_cpu in (True, False)]
        for longest in (512, 2048, 4096, 131_072)
    }
    assert sizes == {512: [16, 16], 2048: [16, 16], 4096: [64, 16], 131_072: [64, 16]}


def test_families_differ_where_they_should(tmp_path: Path) -> None:
    assert read(tmp_path, hf_config("qwen2")).qkv_bias and not read(tmp_path, hf_config("qwen2")).o_bias
    assert read(tmp_path, hf_config("qwen3")).qk_norm
    windowed = read(tmp_path, hf_config("mistral") | {"sliding_window": 64})
    assert windowed.window == 64 and windowed.kv_groups(16, "bfloat16")[0].groups[0].kind is KvKind.SLIDING
    assert read(tmp_path, hf_config("llama") | {"sliding_window": 64}).window is None
    assert read(tmp_path, hf_config("qwen2") | {"sliding_window": 64}).window is None
    by_type = {k: v for k, v in hf_config("qwen3").items() if k != "architectures"}
    assert read(tmp_path, by_type).family == "qwen3"


@pytest.mark.parametrize("family", ["llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "phi3"])
def test_a_window_that_is_not_given_is_that_of_transformers(family: Family, tmp_path: Path) -> None:
    raw = hf_config(family) | {"use_sliding_window": True, "max_window_layers": 0}
    raw.pop("sliding_window", None)
    raw.pop("layer_types", None)
    theirs = getattr(AutoConfig.for_model(**raw), "sliding_window", None)
    config = read(tmp_path, raw)
    windows = {config.window} | {memory.window for memory in config.memories or ()}
    assert windows - {None} == {theirs} - {None}


def test_generation_config_wins_for_the_end_of_sequence(tmp_path: Path) -> None:
    assert read(tmp_path, hf_config("llama")).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert read(tmp_path, hf_config("llama")).eos_token_ids == (7, 9)


@pytest.mark.parametrize(
    ("family", "override", "words"),
    [
        ("llama", {"architectures": ["BertModel"]}, ["BertModel", "LlamaForCausalLM", "OPTForCausalLM"]),
        ("llama", {"architectures": ["GlmForCausalLM"]}, ["GlmForCausalLM", "no native implementation"]),
        ("llama", {"architectures": [], "model_type": "t5"}, ["t5"]),
        ("llama", {"is_encoder_decoder": True}, ["is_encoder_decoder"]),
        ("llama", {"quantization_config": {"quant_method": "eetq"}}, ["quantization_config", "eetq"]),
        ("llama", {"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, ["longrope", "llama3"]),
        ("llama", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
        ("llama", {"head_dim": 12}, ["head_dim 12"]),
        ("llama", {"dtype": "float8_e4m3fn"}, ["float8_e4m3fn"]),
        ("phi3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["yarn", "longrope"]),
        ("gemma3_text", {"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ("gemma2", {"hidden_activation": "gelu"}, ["hidden_activation", "gelu_pytorch_tanh"]),
        ("opt", {"activation_function": "gelu"}, ["activation_function", "gelu"]),
        ("opt", {"layer_norm_elementwise_affine": False}, ["layer_norm_elementwise_affine"]),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 9,
                   "layer_types": ["full_attention", "chunked_attention", "full_attention"]}, ["chunked_attention"]),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(
    family: Any, override: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf_config(family) | override))
    with pytest.raises(UnsupportedModel) as caught:
        ModelConfig.from_directory(tmp_path, "native")
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ({"architectures": ["BertModel"]}, "BertModel is not a decoder-only language model"),
        ({"architectures": ["GlmForCausalLM"]}, "GlmForCausalLM is not a decoder-only"),  # model_type llama
        ({"quantization_config": {"quant_method": "eetq"}}, "quantization_config (eetq) is not supported"),
        ({"dtype": "float8_e4m3fn"}, "checkpoint dtype float8_e4m3fn"),
    ],
)
def test_what_nobody_supports_is_refused_with_our_reason(override: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        read(tmp_path, hf_config("llama") | override)
    assert words in str(caught.value)


def test_what_only_transformers_supports_is_run_by_it_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    partial = {"partial_rotary_factor": 0.5}
    assert read(tmp_path, hf_config("qwen2") | partial).family == "transformers"
    assert "the transformers library defines the model: partial_rotary_factor=0.5 is not supported" in caplog.text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "config.json does not exist"),
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
        (json.dumps({k: v for k, v in hf_config("llama").items() if k != "hidden_size"}), "lacks 'hidden_size'"),
        (json.dumps(hf_config("llama") | {"num_hidden_layers": "many"}), "bad value"),
        (json.dumps(hf_config("llama") | {"num_key_value_heads": 3}), "cannot share 3 KV heads"),
        (json.dumps(hf_config("llama") | {"rope_scaling": {"rope_type": "linear"}}), "bad value"),
        (json.dumps(hf_config("gemma2") | {"num_hidden_layers": 7}), "layer_types names 4 layers of 7"),
        (json.dumps(hf_config("mixtral") | {"num_experts_per_tok": 9}), "cannot have 9 of 4 experts"),
    ],
)
def test_unreadable_configs_are_errors_that_name_the_file(text: str | None, words: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json") as caught:
        ModelConfig.from_directory(tmp_path)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere does not exist"):
        ModelConfig.from_directory(tmp_path / "nowhere")


SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 256},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256, "beta_fast": 16, "beta_slow": 2,
     "truncate": False, "mscale": 0.8, "mscale_all_dim": 0.5},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024, "attention_factor": 1.25},
]  # fmt: skip


@pytest.mark.parametrize("scaling", SCALINGS)
def test_rope_frequencies_are_those_of_transformers(scaling: dict[str, Any], tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    raw = hf_config("llama") | {"head_dim": 64, "rope_parameters": scaling | {"rope_theta": 50_000.0}}
    rope = read(tmp_path, raw).rope
    assert rope is not None
    theirs = LlamaRotaryEmbedding(LlamaConfig(**raw))
    torch.testing.assert_close(inverse_frequencies(rope, 64, 300), theirs.inv_freq, rtol=1e-6, atol=0)
    assert math.isclose(attention_factor(rope), theirs.attention_scaling, rel_tol=1e-6)
    cos, sin = theirs(torch.zeros(1, 300, 64), torch.arange(300)[None])
    table = cos_sin_table(rope, 64, 300)
    torch.testing.assert_close(table[:, :32], cos[0, :, :32], rtol=0, atol=2e-5)
    torch.testing.assert_close(table[:, 32:], sin[0, :, :32], rtol=0, atol=2e-5)


def test_dynamic_rope_gives_each_position_the_base_of_its_own_length(tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    raw = hf_config("llama") | {"max_position_embeddings": 128, "head_dim": 32}
    raw["rope_parameters"] = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    config = read(tmp_path, raw)
    assert config.rope is not None and config.max_model_len == 512
    table = cos_sin_table(config.rope, 32, 512)
    for position in (0, 100, 127, 128, 129, 300, 511):
        frequencies, _ = ROPE_INIT_FUNCTIONS["dynamic"](LlamaConfig(**raw), seq_len=position + 1)
        torch.testing.assert_close(table[position, :16], (position * frequencies).cos(), rtol=0, atol=2e-5)


def test_scaling_stretches_the_longest_sequence_as_in_vllm(tmp_path: Path) -> None:
    lengths = {
        "linear": {"factor": 4.0},
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 1024},
        "llama3": {"factor": 8.0, "original_max_position_embeddings": 256},
    }
    found = {
        kind: read(tmp_path, hf_config("llama") | {"rope_scaling": {"rope_type": kind} | keys}).max_model_len
        for kind, keys in lengths.items()
    }
    assert found == {"linear": 8192, "yarn": 4096, "llama3": 2048}
