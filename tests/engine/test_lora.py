"""Adapters in the engine: equality with PEFT, many adapters in one step, and errors with the name of the field."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.adapters import CONFIG_FILE, WEIGHTS_FILE, AdapterError, read_adapter
from engine.draft import Draft
from engine.errors import ModelError
from engine.lora import LoraAdapter
from engine.model_runner import ModelRunner, RunnerSettings
from engine.rows import DecodeRows
from engine.tiny import make_checkpoint
from testing.adapters import ALL, make_adapter, merge
from testing.engine import Batch

PROMPTS = [[5 + (7 * i + j) % 500 for j in range(length)] for i, length in enumerate((3, 17, 40, 25))]
OF_PROMPT = ("one", "two", None, "three")
"""The adapter of each prompt of a batch: three adapters and the base model."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), std=0.1)


@pytest.fixture(scope="module")
def adapters(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters with different ranks, targets and scales: all layers, only attention with rsLoRA, and patterns."""
    base = tmp_path_factory.mktemp("adapters")
    pattern = {"rank_pattern": {"q_proj": 2, r".*\.1\.mlp\.up_proj": 7}, "alpha_pattern": {"mlp.down_proj": 3}}
    return {
        "one": make_adapter(base / "one", llama, rank=4, seed=1),
        "two": make_adapter(base / "two", llama, rank=16, seed=2, targets=ALL[:4], use_rslora=True, std=0.1),
        "three": make_adapter(base / "three", llama, rank=5, seed=3, **pattern),
    }


def runner_of(path: Path, **settings: Any) -> ModelRunner:
    return ModelRunner(RunnerSettings(path, num_threads=1, enable_lora=True, **settings))


def loaded(runner: ModelRunner, directory: Path, name: str = "it") -> LoraAdapter:
    assert runner.lora is not None
    return runner.lora.load(read_adapter(name, str(directory)))


def run(
    runner: ModelRunner, prompts: list[list[int]], chosen: list[LoraAdapter | None], budget: int = 30
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Returns greedy tokens and their logits. Prompts are divided into chunks."""
    batch = Batch.of(runner, prompts, 6, budget=budget)
    for sequence, adapter in zip(batch.sequences, chosen, strict=True):
        sequence.adapter = adapter
    return batch.run(), [torch.stack(rows) for rows in batch.logits]


def peft_logits(model: Path, adapter: Path | None, token_ids: list[int]) -> torch.Tensor:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    reference = reference if adapter is None else PeftModel.from_pretrained(reference, str(adapter))
    with torch.inference_mode():
        return reference(torch.tensor([token_ids])).logits[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("eager", [False, True])
def test_three_adapters_and_the_base_in_one_batch_agree_with_peft(
    llama: Path, adapters: dict[str, Path], eager: bool
) -> None:
    runner = runner_of(llama, dtype="float32", enforce_eager=eager)
    chosen = [None if name is None else loaded(runner, adapters[name]) for name in OF_PROMPT]
    tokens, logits = run(runner, PROMPTS, chosen)
    for name, prompt, output, found in zip(OF_PROMPT, PROMPTS, tokens, logits, strict=True):
        want = peft_logits(llama, None if name is None else adapters[name], prompt + output)[len(prompt) - 1 : -1]
        assert output == want.argmax(-1).tolist()
        assert (found - want).abs().max() < 2e-4 * want.abs().max()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_row_has_the_same_bits_alone_and_beside_other_adapters(
    llama: Path, adapters: dict[str, Path], dtype: str
) -> None:
    """The bits are the same in one C call and kernel by kernel, in chunks and whole. The row of the base model has the
    bits that it has without adapters.
    """
    runner, eager = runner_of(llama, dtype=dtype), runner_of(llama, dtype=dtype, enforce_eager=True)
    chosen = [None if name is None else loaded(runner, adapters[name]) for name in OF_PROMPT]
    _, together = run(runner, PROMPTS, chosen)
    for prompt, adapter, found in zip(PROMPTS, chosen, together, strict=True):
        assert torch.equal(run(runner, [prompt], [adapter], budget=1000)[1][0], found)
    assert all(map(torch.equal, run(eager, PROMPTS, chosen, budget=300)[1], together))
    plain = ModelRunner(replace(runner.settings, enable_lora=False))
    assert torch.equal(run(plain, [PROMPTS[2]], [None])[1][0], together[2])


def test_the_rows_of_drafts_have_the_bits_of_single_steps(llama: Path, adapters: dict[str, Path]) -> None:
    runner = runner_of(llama, dtype="bfloat16")
    batch = Batch.of(runner, PROMPTS, 6)
    for sequence, name in zip(batch.sequences, OF_PROMPT, strict=True):
        sequence.adapter = None if name is None else loaded(runner, adapters[name])
    drafts = [Draft(tuple(output[1:5])) for output in batch.run()]
    for sequence in batch.sequences:
        sequence.num_computed = len(sequence.prompt_ids)
        del sequence.output_ids[1:]
    rows = runner.step(DecodeRows(runner.layout.block_size).lay_out(batch.sequences, drafts).batch)
    assert torch.equal(rows, torch.stack([row for each in batch.logits for row in each[1:]]))


TARGETS = {
    "opt": ("q_proj", "v_proj", "out_proj", "fc1", "fc2"),
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "mixtral": ALL[:4],
}


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2", "phi3", "mixtral", "opt"])
def test_other_families_equal_the_merged_model(family: Any, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", family, std=0.1)
    adapter = make_adapter(tmp_path / "adapter", model, targets=TARGETS.get(family, ALL))
    runner = runner_of(model, dtype="float32")
    tokens, logits = run(runner, PROMPTS[1:2], [loaded(runner, adapter)])
    merged = ModelRunner(RunnerSettings(merge(tmp_path / "merged", model, adapter), dtype="float32", num_threads=1))
    want_tokens, want = run(merged, PROMPTS[1:2], [None])
    assert tokens == want_tokens and torch.allclose(logits[0], want[0], rtol=1e-3, atol=1e-3)


def test_quantized_weights_take_adapters(llama: Path, adapters: dict[str, Path]) -> None:
    """With an adapter, the difference between the rounded and the exact model is much smaller than the adapter's
    effect.
    """
    runner = runner_of(llama, dtype="float32", quantization="int8")
    adapter = loaded(runner, adapters["one"])
    base, adapted = (run(runner, PROMPTS[:1], [each])[1][0][0] for each in (None, adapter))
    exact = runner_of(llama, dtype="float32")
    want = run(exact, PROMPTS[:1], [loaded(exact, adapters["one"])])[1][0][0]
    assert (adapted - want).norm() < 0.1 * (adapted - base).norm()


def test_memory_for_adapters_counts_as_weights(llama: Path, adapters: dict[str, Path]) -> None:
    with_adapters, without = (
        ModelRunner(RunnerSettings(llama, num_threads=1, enable_lora=on, max_loras=3, max_lora_rank=5))
        for on in (True, False)
    )
    assert with_adapters.lora is not None
    most = with_adapters.lora.max_adapter_bytes
    assert with_adapters.weights_bytes == without.weights_bytes + 3 * most
    assert 0.9 * most < loaded(with_adapters, adapters["one"]).weights.num_bytes * 5 / 4 <= most


def _config(**changes: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / CONFIG_FILE
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def _tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        tensors = load_file(directory / WEIGHTS_FILE)
        change(tensors)
        save_file(tensors, directory / WEIGHTS_FILE)

    return apply


Q0 = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def _of_lm_head(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    names = (Q0, Q0.replace("lora_A", "lora_B"))
    return {name.replace("layers.0.self_attn.q_proj", "lm_head"): tensors[name].clone() for name in names}


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_config(use_dora=True), "use_dora"),
        (_config(bias="all"), "bias is 'all'"),
        (_config(modules_to_save=["lm_head"]), "modules_to_save"),
        (_config(peft_type="IA3"), "peft_type"),
        (_config(init_lora_weights="pissa_niter_4"), "init_lora_weights"),
        (_config(r=0), "r must be at least 1 and lora_alpha finite"),
        (_config(rank_pattern={"(": 4}), "rank_pattern"),
        (_config(r=32), "the rank of .* is 32, and --max-lora-rank is 16"),
        (_tensors(lambda t: t.update(lora_embedding_A=torch.zeros(4, 4))), "tensor lora_embedding_A is not supported"),
        (
            _tensors(lambda t: t.update(_of_lm_head(t))),
            r"adapts model\.lm_head, which is not",
        ),
        (_tensors(lambda t: t.pop(Q0)), "q_proj has only one of"),
        (_tensors(lambda t: t.update({Q0: torch.zeros(4, 63)})), r"lora_A of .*q_proj has shape \[4, 63\]"),
        (lambda directory: (directory / WEIGHTS_FILE).write_bytes(b"not safetensors"), "corrupt"),
        (lambda directory: (directory / WEIGHTS_FILE).unlink(), "cannot be read"),
    ],
)
def test_refusals_name_the_field(llama: Path, tmp_path: Path, spoil: Callable[[Path], None], why: str) -> None:
    directory = make_adapter(tmp_path, llama)
    spoil(directory)
    with pytest.raises(AdapterError, match=why):
        loaded(runner_of(llama), directory)


def test_content_that_changed_after_it_was_named_is_not_loaded(llama: Path, tmp_path: Path) -> None:
    runner, directory = runner_of(llama), make_adapter(tmp_path, llama, seed=1)
    named = read_adapter("it", str(directory))
    make_adapter(tmp_path, llama, seed=2)
    assert runner.lora is not None
    with pytest.raises(AdapterError, match="has changed"):
        runner.lora.load(named)


def test_a_model_of_transformers_refuses_adapters(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, std=0.1)
    with pytest.raises(ModelError, match="transformers"):
        runner_of(tmp_path, model_impl="transformers")
