"""Tiny random checkpoints in Hugging Face's format, for tests, and for `looseleaf serve` if no model is given and the
built-in model is missing.

Making a checkpoint does not require transformers. The models produce gibberish, but run the same code as real models.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from engine.config import ARCHITECTURES, Family, ModelConfig

VOCAB_SIZE = 512
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
BOS_ID, EOS_ID = 1, 2

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_GEMMA = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 24,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 24,
}
PECULIAR: dict[Family, dict[str, Any]] = {
    "gemma2": {**_GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0},
    "gemma3_text": {**_GEMMA, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
    "phi3": {"sliding_window": 24},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "mlp_only_layers": [1]},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
}
"""Keys of config.json that are specific to a family or have a different value there."""

TEXT = """\
A prompt's cache of keys and values is not a bound notebook. It is a binder of loose leaves, and a block table is the
binder's index. When a reader comes back with the same first pages, the leaves are there; when two readers share a first
chapter, they share its leaves and copy only the one they write on. Nobody reads a leaf that has been torn out, because
every leaf carries the number of its life.
Once there was a small girl named Lily who lived near the old mill. She had a red ball, a brown dog, and a friend called
Tom. One day the dog ran away with the ball. "Come back!" said Lily. The dog did not come back. Tom said, "Let us look
in the garden." They looked in the garden, under the big tree, and behind the house. Then they heard a sound. It was the
dog, and he had found a little bird that could not fly. They were happy that they had found them both.
The mill turned when the wind was strong and stood still when it was not; the miller read the weather from the leaves.
What is the capital of the country in the north? Where does the river begin? How many steps are there to the top of the
tower? There are one hundred and twenty-eight, 128, and after 3,141 more you would be in the clouds. You can count them:
1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, and so on.
The user asks, the assistant answers, the system waits.
def prefill(tokens, blocks):
    for token in tokens:
        blocks.write(token)
    return blocks.table()
It was the best of leaves, it was the worst of leaves; it was the time of writing, it was the time of reading again.
"""


def make_checkpoint(
    directory: str | Path,
    family: Family = "llama",
    *,
    seed: int = 0,
    std: float = 0.3,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Path:
    """Writes config, weights, tokenizer and chat template of a random model. Returns the directory.

    `overrides` are keys of config.json. Matrices and biases are normally distributed with standard deviation `std`.
    Norm weights are near 1 (near 0 if the model adds 1) but not equal to it, so that tests detect a missing norm. The
    same arguments give the same weights.
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    raw = hf_config(family) | {"dtype": str(dtype).removeprefix("torch.")} | overrides
    _write_json(path / "config.json", raw)
    _write_json(path / "generation_config.json", {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID})
    config = ModelConfig.from_directory(path)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in parameter_shapes(config):
        values = torch.randn(shape, generator=generator) * std
        is_norm = len(shape) == 1 and not name.endswith(".bias")
        tensors[name] = (values / 3 + (not config.norm_offset) if is_norm else values).to(dtype)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(path)
    return path


def hf_config(family: Family) -> dict[str, Any]:
    """Returns the config.json of a family's tiny model, which has hidden size 64, 4 heads of size 16, 2 KV heads (OPT:
    4), and 3 layers (Gemma: 4).
    """
    common = {
        "architectures": [name for name, known in ARCHITECTURES.items() if known == family],
        "model_type": family,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 2048,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": 0,
    }
    if family == "opt":
        return common | {
            "ffn_dim": 128,
            "word_embed_proj_dim": 64,
            "do_layer_norm_before": True,
            "activation_function": "relu",
            "dropout": 0.0,
            "tie_word_embeddings": True,
        }
    config = common | {
        "intermediate_size": 128,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    if family == "mistral":
        config["sliding_window"] = None
    if family in ("qwen2", "qwen3"):
        config["use_sliding_window"] = False
    return config | PECULIAR.get(family, {})


def parameter_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the names and shapes of a checkpoint's tensors, as transformers saves them."""
    yield from _opt_shapes(config) if config.family == "opt" else _llama_shapes(config)


def _llama_shapes(c: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    h = c.hidden_size
    yield "model.embed_tokens.weight", (c.vocab_size, h)
    for n in range(c.num_layers):
        at = f"model.layers.{n}."
        sandwich = ("pre_feedforward_layernorm", "post_feedforward_layernorm") if c.sandwich_norms else ()
        for name in ("input_layernorm", "post_attention_layernorm", *sandwich):
            yield f"{at}{name}.weight", (h,)
        yield from _attention_shapes(c, f"{at}self_attn.")
        yield from _mlp_shapes(c, n, at)
    yield "model.norm.weight", (h,)
    if not c.tie_embeddings:
        yield "lm_head.weight", (c.vocab_size, h)


def _attention_shapes(c: ModelConfig, at: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    h, q, kv = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    parts = [("qkv_proj", q + 2 * kv)] if c.fused_projections else [("q_proj", q), ("k_proj", kv), ("v_proj", kv)]
    for name, out in parts:
        yield from _linear_shapes(at + name, out, h, c.qkv_bias)
    yield from _linear_shapes(at + "o_proj", h, q, c.o_bias)
    for name in ("q_norm", "k_norm") if c.qk_norm else ():
        yield f"{at}{name}.weight", (c.head_dim,)


def _mlp_shapes(c: ModelConfig, layer: int, at: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    h, i = c.hidden_size, c.intermediate_size
    if c.experts is not None and layer not in c.experts.dense_layers:
        router, experts, gate, up, down = c.experts.names
        i = c.experts.intermediate_size
        yield f"{at}{router}.weight", (c.experts.count, h)
        for n in range(c.experts.count):
            for name, shape in ((gate, (i, h)), (up, (i, h)), (down, (h, i))):
                yield f"{at}{experts}.{n}.{name}.weight", shape
        return
    parts = [("gate_up_proj", 2 * i)] if c.fused_projections else [("gate_proj", i), ("up_proj", i)]
    for name, out in parts:
        yield from _linear_shapes(f"{at}mlp.{name}", out, h, c.mlp_bias)
    yield from _linear_shapes(f"{at}mlp.down_proj", h, i, c.mlp_bias)


def _opt_shapes(c: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    h, at = c.hidden_size, "model.decoder."
    yield at + "embed_tokens.weight", (c.vocab_size, c.embed_dim)
    yield at + "embed_positions.weight", (c.max_model_len + 2, h)
    if c.embed_dim != h:
        yield at + "project_in.weight", (h, c.embed_dim)
        yield at + "project_out.weight", (c.embed_dim, h)
    for n in range(c.num_layers):
        layer = f"{at}layers.{n}."
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _linear_shapes(f"{layer}self_attn.{name}", h, h, c.qkv_bias)
        yield from _linear_shapes(layer + "fc1", c.intermediate_size, h, c.mlp_bias)
        yield from _linear_shapes(layer + "fc2", h, c.intermediate_size, c.mlp_bias)
        for name in ("self_attn_layer_norm", "final_layer_norm"):
            yield f"{layer}{name}.weight", (h,)
            yield f"{layer}{name}.bias", (h,)
    if c.final_norm:
        yield at + "final_layer_norm.weight", (h,)
        yield at + "final_layer_norm.bias", (h,)
    if not c.tie_embeddings:
        yield "lm_head.weight", (c.vocab_size, c.embed_dim)


def _linear_shapes(name: str, out: int, size_in: int, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield name + ".weight", (out, size_in)
    if bias:
        yield name + ".bias", (out,)


def write_tokenizer(directory: Path) -> None:
    """Writes a byte-level BPE tokenizer of 512 tokens, trained on `TEXT`, and a chat template. The tokenizer adds <s>
    before a text.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS_ID)])
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "add_bos_token": True,
            "clean_up_tokenization_spaces": False,
        },
    )
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
