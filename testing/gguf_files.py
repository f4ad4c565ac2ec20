"""Writes GGUF files of tiny checkpoints, each with an fp32 twin that has the same weights. The gguf package writes the
files and decodes their blocks for the twins.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

from engine.config import Family
from engine.tiny import BOS_ID, EOS_ID, make_checkpoint

Floats = npt.NDArray[np.float32]
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
"""The sizes of the models. K types need rows whose length is a multiple of 256."""


def random_blocks(kind: Type, n_out: int, n_in: int, seed: int) -> npt.NDArray[np.uint8]:
    """Returns random blocks of a type as uint8 [n_out, bytes of a row]. Some types can be read but not written by gguf.
    The fp16 scales make the weights small, and about half of them negative.
    """
    rng = np.random.default_rng(seed)
    per_block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (n_out, n_in // per_block, size), dtype=np.uint8)
    scales = rng.uniform(1, 2, (*blocks.shape[:2], 1))
    usual = {Type.Q4_K: {0: 2e-4, 2: 15e-4}, Type.Q6_K: {208: 3e-5}, Type.Q4_1: {0: 0.01, 2: -0.075}}
    for start, factor in usual.get(kind, {0: 0.01}).items():
        blocks[..., start : start + 2] = (factor * scales).astype(np.float16).view(np.uint8)
    return blocks.reshape(n_out, -1)


def make_gguf(file: Path, twin: Path, family: Family, kinds: dict[str, Type], **overrides: Any) -> None:
    """Writes a random model of a family to `file`, and an fp32 model with the same weights to `twin`.

    `kinds` maps a part of a matrix's GGUF name to the matrix's type. Other matrices are Q8_0, and vectors are fp32.
    """
    make_checkpoint(twin, family, seed=8, std=0.06, **(SIZES | overrides))
    config = json.loads((twin / "config.json").read_text())
    tensors = load_file(twin / "model.safetensors")
    architecture = "llama" if family in ("llama", "mistral") else family
    writer = gguf.GGUFWriter(file, architecture)
    _describe(writer, config, json.loads((twin / "tokenizer.json").read_text()))
    for name, tensor in tensors.items():
        stored, given = _name(name), tensor.numpy()
        heads = _heads(name, config) if architecture == "llama" else None
        if tensor.dim() == 1:
            writer.add_tensor(stored, given)
            continue
        kind = next((kind for part, kind in kinds.items() if part in stored), Type.Q8_0)
        if kind in (Type.Q4_K, Type.Q6_K):
            blocks = random_blocks(kind, given.shape[0], given.shape[1], seed=len(name))
        else:
            blocks = gguf.quantize(_neighbours(given, heads), kind)
        writer.add_tensor(stored, blocks, raw_dtype=kind)
        tensors[name] = torch.from_numpy(_halves(gguf.dequantize(blocks, kind), heads).copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(tensors, twin / "model.safetensors", metadata={"format": "pt"})


def _describe(writer: gguf.GGUFWriter, config: dict[str, Any], tokenizer: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base((config.get("rope_parameters") or config).get("rope_theta", 10_000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    vocabulary = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    special = {token["id"] for token in tokenizer["added_tokens"] if token["special"]}
    kinds = [gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for _, i in vocabulary]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types(kinds)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_ID)


def _name(name: str) -> str:
    outside = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if not name.startswith("model.layers."):
        return outside.get(name, "output.weight")
    _, _, layer, rest = name.split(".", 3)
    part, _, what = rest.rpartition(".")
    return f"blk.{layer}.{NAMES[part]}.{what}"


def _heads(name: str, config: dict[str, Any]) -> int | None:
    if "q_proj" in name:
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if "k_proj" in name else None


def _neighbours(rows: Floats, heads: int | None) -> Floats:
    """Reorders rows as llama.cpp's conversion does, for the rotation of neighboring pairs. If `heads` is None, keeps
    the order.
    """
    if heads is None:
        return rows
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def _halves(rows: Floats, heads: int | None) -> Floats:
    if heads is None:
        return rows
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))
