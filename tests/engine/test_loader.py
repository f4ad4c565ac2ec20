"""Weights: single and sharded files, tied and dummy weights, errors with the name of the file or tensor,
fingerprints.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import StartupError
from engine.checkpoint import fingerprint
from engine.dummy_weights import DummySource
from engine.errors import ModelError
from engine.loader import Target, Weights
from engine.model_runner import ModelRunner, RunnerSettings
from engine.tiny import hf_config, make_checkpoint
from gateway.intake.assets import load_assets
from testing.oracle import Oracle

IDS = list(range(5, 40))


def logits(directory: Path, **settings: object) -> torch.Tensor:
    return Oracle(ModelRunner(RunnerSettings(directory, **settings, num_threads=1))).logits(IDS)  # type: ignore[arg-type]


def shard(directory: Path) -> None:
    """Splits model.safetensors into two files with an index."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names, weight_map = sorted(tensors), {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def edit(directory: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(directory / "model.safetensors") | changes
    save_file({name: t for name, t in tensors.items() if t is not None}, directory / "model.safetensors")


def test_sharded_weights_are_the_single_file_ones(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen2")
    expected = logits(tmp_path)
    shard(tmp_path)
    assert torch.equal(logits(tmp_path), expected)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors does not exist"):
        ModelRunner(RunnerSettings(tmp_path, num_threads=1))


def test_half_precision_checkpoints_run_in_bf16(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "half", "llama", dtype=torch.float16)
    make_checkpoint(tmp_path / "full", "llama", dtype=torch.float32)
    difference = logits(tmp_path / "half") - logits(tmp_path / "full")
    assert 0 < difference.square().mean().sqrt() < 0.1 * logits(tmp_path / "full").std()


def test_facebooks_opt_names_and_old_buffers_load(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "opt", "opt")
    expected = logits(tmp_path / "opt")
    tensors = load_file(tmp_path / "opt" / "model.safetensors")
    renamed = {name.removeprefix("model."): t for name, t in tensors.items()}
    save_file(renamed, tmp_path / "opt" / "model.safetensors")
    assert torch.equal(logits(tmp_path / "opt"), expected)
    make_checkpoint(tmp_path / "llama", "llama")
    edit(tmp_path / "llama", **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    logits(tmp_path / "llama")


def test_a_tied_checkpoint_may_repeat_its_head(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    expected = logits(tmp_path)
    edit(tmp_path, **{"lm_head.weight": load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"].clone()})
    assert torch.equal(logits(tmp_path), expected)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, r"lacks tensor model\.layers\.1\.mlp\.up_proj\.weight"),
        ({"model.norm.weight": torch.ones(63)}, r"model\.norm\.weight in .*shape \[63\], but .* requires \[64\]"),
        ({"model.extra.weight": torch.ones(3)}, r"unexpected tensor model\.extra\.weight"),
        ({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}, r"unexpected tensor .*q_proj\.bias"),
    ],
)
def test_a_checkpoint_that_does_not_fit_its_config_is_refused(
    changes: dict[str, torch.Tensor | None], words: str, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, "llama")
    edit(tmp_path, **changes)
    with pytest.raises(ModelError, match=words):
        ModelRunner(RunnerSettings(tmp_path, num_threads=1))


def test_corrupt_and_missing_files_are_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for corrupt in (b"", b"abc", whole[:-1], whole + b"x", b"\xff" * 8 + whole[8:], whole[:8] + b"}" + whole[9:]):
        file.write_bytes(corrupt)
        with pytest.raises(ModelError, match=r"model\.safetensors is corrupt"):
            ModelRunner(RunnerSettings(tmp_path, num_threads=1))
    file.unlink()
    with pytest.raises(ModelError, match="has neither model"):
        ModelRunner(RunnerSettings(tmp_path, num_threads=1))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"pickled .* are not read: convert them with"):
        ModelRunner(RunnerSettings(tmp_path, num_threads=1))


def test_an_altered_file_is_not_the_one_that_was_listed(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    listed = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.iterdir()}
    sums = tmp_path / "SHA256SUMS"
    sums.write_text("".join(f"{digest}  ./{name}\n" for name, digest in listed.items()))
    ModelRunner(RunnerSettings(tmp_path, num_threads=1))
    load_assets(str(tmp_path))
    whole = bytearray((tmp_path / "model.safetensors").read_bytes())
    whole[-1] ^= 1  # flips one bit of the last weight; the file is otherwise valid
    (tmp_path / "model.safetensors").write_bytes(whole)
    with pytest.raises(StartupError, match=r"model\.safetensors is not the file that SHA256SUMS lists"):
        ModelRunner(RunnerSettings(tmp_path, num_threads=1))
    load_assets(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(StartupError, match=r"tokenizer_config\.json is not"):
        load_assets(str(tmp_path))
    sums.write_text(f"{'0' * 64} *another\n")
    with pytest.raises(StartupError, match=r"config\.json is not listed in SHA256SUMS"):
        load_assets(str(tmp_path))
    sums.write_text("abc  config.json\n")
    with pytest.raises(StartupError, match="SHA256SUMS, line 1: must be a SHA-256 and a file's name"):
        load_assets(str(tmp_path))


def test_max_model_len_may_be_cut_but_not_stretched(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    assert ModelRunner(RunnerSettings(tmp_path, max_model_len=100, num_threads=1)).max_model_len == 100
    with pytest.raises(ModelError, match="max_model_len 4096 is more than the model's 2048"):
        ModelRunner(RunnerSettings(tmp_path, max_model_len=4096, num_threads=1))


def test_dummy_weights_come_from_config_and_seed_alone(tmp_path: Path) -> None:
    for family in ("llama", "opt"):
        directory = tmp_path / family
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(hf_config(family)))
        one = logits(directory, load_format="dummy")
        assert torch.equal(one, logits(directory, load_format="dummy"))
        assert not torch.equal(one, logits(directory, load_format="dummy", seed=1))
        assert one.isfinite().all() and one.std() > 0


def test_125m_dummy_weights_load_in_three_seconds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    raw = hf_config("llama") | {
        "vocab_size": 32000, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "head_dim": 64,
        "num_key_value_heads": 4, "intermediate_size": 2048,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw))
    caplog.set_level(logging.INFO, logger="engine")
    start = time.thread_time()
    runner = ModelRunner(RunnerSettings(tmp_path, load_format="dummy", num_threads=1))
    assert time.thread_time() - start < 3
    parameters = 2 * 32000 * 768 + 12 * (768 * (768 * 2 + 512 + 3 * 2048) + 2 * 768) + 768
    assert runner.weights_bytes == 2 * parameters
    assert "loading dummy weights" in caplog.text


@pytest.mark.parametrize(("dtype", "copies"), [(torch.float32, 2), (torch.float16, 1)])
def test_tied_embeddings_count_twice_only_where_packing_copies(dtype: torch.dtype, copies: int) -> None:
    """fp16 stands for a GPU, because neither packs weights."""
    target = Target(dtype, torch.device("cpu"), deterministic=False)
    weights = Weights(DummySource(0, target), target)
    head = weights.pack(weights.tensor("embed.weight", 64, 32))
    assert head.is_packed == (copies == 2) and weights.num_bytes == copies * 64 * 32 * dtype.itemsize


def test_fingerprints_follow_content_not_place(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "a", "llama")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    base = fingerprint(tmp_path / "a", "bfloat16", "auto")
    assert fingerprint(tmp_path / "b", "bfloat16", "auto") == base
    assert fingerprint(tmp_path / "a", "float32", "auto") != base
    assert fingerprint(tmp_path / "a", "bfloat16", "dummy") != base
    make_checkpoint(tmp_path / "b", "llama", seed=1)
    assert fingerprint(tmp_path / "b", "bfloat16", "auto") != base
    make_checkpoint(tmp_path / "b", "llama", rms_norm_eps=1e-6)
    assert fingerprint(tmp_path / "b", "bfloat16", "auto") != base
    shutil.copytree(tmp_path / "a", tmp_path / "c")
    last = load_file(tmp_path / "c" / "model.safetensors")["model.layers.2.mlp.down_proj.weight"]
    edit(tmp_path / "c", **{"model.layers.2.mlp.down_proj.weight": last + 1})
    assert fingerprint(tmp_path / "c", "bfloat16", "auto") != base


def test_tiny_checkpoints_come_with_a_tokenizer_that_round_trips(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    start = time.thread_time()
    make_checkpoint(tmp_path, "llama")
    assert time.thread_time() - start < 2
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 512
    text = "Once there was a dog, 3.14 times: naïve — 葉 🍂\n"
    ids = tokenizer.encode(text).ids
    assert ids[0] == 1 and max(ids) < 512 and tokenizer.decode(ids) == text
    chat = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        [{"role": "user", "content": "Hello"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<s><|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
