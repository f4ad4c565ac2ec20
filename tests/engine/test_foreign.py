"""Model families from transformers, and native families: equal logits, row-invariant bits, and reasons for refusals."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import ModelConfig
from engine.errors import ModelError, UnsupportedModel
from engine.foreign import attention_hook, packed_weight, row_check
from engine.foreign import config as foreign_config
from engine.foreign.model import TransformersModel
from engine.sequence import Chunk, lay_out
from testing.against_transformers import by_transformers, distance, prompt, runner_of
from testing.engine import Batch
from testing.oracle import Oracle
from testing.zoo import REFUSED, ZOO, make_foreign

transformers = pytest.importorskip("transformers")
NATIVE = ("gemma2", "gemma3", "mixtral", "phi3", "phi3-longrope", "qwen2-mixed", "qwen3-moe")
"""The families of the zoo whose native implementation differs from Llama's."""
BOTH = [*((name, "transformers") for name in ZOO), *((name, "native") for name in NATIVE)]
STATEFUL = ("mamba2", "falcon-mamba", "bamba", "falcon-h1", "qwen3-next", "lfm2")
CLOSE, CLOSE_RMS = 2e-5, 5e-6
"""Tolerances (maximum, root mean square), as fractions of the logits' standard deviation."""
NOISE = 1.5
Make = Callable[[str], Path]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Make:
    @cache
    def make(name: str) -> Path:
        return make_foreign(tmp_path_factory.mktemp(name), (ZOO | REFUSED)[name])

    return make


@pytest.mark.parametrize(("name", "impl"), BOTH)
def test_logits_are_those_of_transformers(checkpoint: Make, name: str, impl: str) -> None:
    """The logits are within CLOSE of transformers in fp32, or at least as close to its float64 as its own fp32 is. Our
    own layers sum in another order, with as much noise, and may be NOISE times as far.
    """
    directory = checkpoint(name)
    runner = runner_of(directory, model_impl=impl)
    tokens = prompt(runner.config.vocab_size)
    got = Oracle(runner).logits(tokens, chunk=24)
    want = by_transformers(directory, tokens, torch.float32)
    exact = by_transformers(directory, tokens, torch.float64)
    own_error = distance(want, exact) * (NOISE if impl == "native" else 1.0)
    assert distance(got, want) <= max(CLOSE, own_error) or distance(got, exact) <= own_error
    assert float((got.double() - want).pow(2).mean().sqrt() / want.std()) <= CLOSE_RMS
    assert torch.equal(got.argmax(-1), want.argmax(-1))
    assert len(set(want.argmax(-1).tolist())) > 20, "a model that says one thing over and over shows nothing"


@pytest.mark.parametrize("name", ["gemma2", "mamba2", "phi3"])
def test_hidden_states_are_those_of_transformers(checkpoint: Make, name: str) -> None:
    directory = checkpoint(name)
    runner = runner_of(directory)
    tokens = prompt(runner.config.vocab_size)
    sequence = Batch.of(runner, [tokens], 1).sequences[0]
    sequence.pooling = "mean"
    ours = runner.hidden_states(lay_out([Chunk(sequence, len(tokens))], runner.layout.block_size).batch)
    model = transformers.AutoModel.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        theirs = model(torch.tensor([tokens])).last_hidden_state[0].double()
    assert distance(ours.double(), theirs) < CLOSE * 5


ROWS_IN_FP32 = ("deepseek-v3", "gemma2", "gpt2", "mixtral", "qwen3-next")
"""Families whose rows every test run compares in fp32. `make families` compares all families."""
ROWS = [
    *((name, impl, "bfloat16") for name, impl in BOTH),
    *(
        pytest.param(name, impl, "float32", marks=[] if name in ROWS_IN_FP32 else pytest.mark.families)
        for name, impl in BOTH
    ),
]


@pytest.mark.parametrize(("name", "impl", "dtype"), ROWS)
def test_rows_have_the_same_bits_in_chunks_of_any_size(checkpoint: Make, name: str, impl: str, dtype: str) -> None:
    runner = runner_of(checkpoint(name), dtype=dtype, model_impl=impl)
    row_check.check_rows(runner)
    oracle, tokens = Oracle(runner), prompt(runner.config.vocab_size, 37)  # longer than a window and two blocks
    alone = oracle.logits(tokens, chunk=1)
    for chunk in (5, 24, 37):
        assert torch.equal(oracle.logits(tokens, chunk=chunk), alone), chunk


@pytest.mark.parametrize(
    ("name", "field"),
    [("gemma2", "softcap"), ("gemma2", "window"), ("gpt-oss", "sinks"), ("gpt-oss", "window"), ("granite", "scale")],
)
def test_what_is_peculiar_to_a_family_matters(checkpoint: Make, name: str, field: str) -> None:
    """The comparison above would fail without this property of the family."""
    directory = checkpoint(name)
    runner = runner_of(directory)
    model = runner.model
    assert isinstance(model, TransformersModel)
    assert any(getattr(layer, field) is not None for layer in model.layers.values())
    plain = {"scale": 16**-0.5}.get(field)
    model.layers = {index: replace(layer, **{field: plain}) for index, layer in model.layers.items()}
    runner.attention_by_layer = runner._attention_by_layer()
    tokens = prompt(runner.config.vocab_size)
    got = Oracle(runner).logits(tokens, chunk=24)
    assert distance(got, by_transformers(directory, tokens, torch.float32)) > 0.01


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gemma2", {"softcap": None}), ("gemma2", {"logits_softcap": None}), ("gemma2", {"memories": ()}),
        ("gemma3", {"window_rope": None}), ("gemma3", {"embed_scale": 1.0}), ("gemma3", {"norm_offset": False}),
        ("gemma3", {"softmax_scale": None}), ("gemma3", {"activation": "silu"}), ("phi3", {"window": None}),
    ],
)  # fmt: skip
def test_what_is_peculiar_to_a_native_family_matters(
    checkpoint: Make, monkeypatch: pytest.MonkeyPatch, name: str, change: dict[str, Any]
) -> None:
    directory = checkpoint(name)
    plain = replace(ModelConfig.from_directory(directory, "native"), **change)
    monkeypatch.setattr(ModelConfig, "from_directory", lambda *_: plain)
    tokens = prompt(plain.vocab_size)
    got = Oracle(runner_of(directory)).logits(tokens, chunk=24)
    assert distance(got, by_transformers(directory, tokens, torch.float32)) > 0.01


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("forgotten", ["convolution", "recurrence"])
def test_what_a_chunk_leaves_to_the_next_matters(
    checkpoint: Make, monkeypatch: pytest.MonkeyPatch, name: str, forgotten: str
) -> None:
    """The comparison above would fail if every chunk began with an empty state."""
    kernel = getattr(attention_hook, forgotten)

    def forgetful(*args: Any) -> torch.Tensor:
        *inputs, states, batch = args
        states.zero_()
        return kernel(*inputs, states, batch)

    directory = checkpoint(name)
    runner = runner_of(directory)
    tokens = prompt(runner.config.vocab_size)
    monkeypatch.setattr(attention_hook, forgotten, forgetful)
    got = Oracle(runner).logits(tokens, chunk=24)
    far = distance(got, by_transformers(directory, tokens, torch.float32)) > 0.01
    assert far == (forgotten == "convolution" or name != "lfm2"), "LFM2 has convolutions alone"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("bloom", "BloomForCausalLM adds ALiBi to attention scores"),
        ("falcon", "has no attention interface"),
        ("falcon-alibi", "FalconForCausalLM adds ALiBi to attention scores"),
        ("kimi-linear", "recurrent state of a kind that is not supported"),
        ("minimax", "recurrent state of a kind that is not supported"),
        ("mpt", "MptForCausalLM adds ALiBi to attention scores"),
        ("recurrent-gemma", "does not belong to exactly one layer"),
        ("rwkv", "neither attention heads nor a known kind"),
    ],
)
def test_what_would_give_wrong_numbers_is_refused_by_name(checkpoint: Make, name: str, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        runner_of(checkpoint(name))


def test_products_of_torch_are_noticed_and_refused_unless_allowed(
    checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_weight, "pack", lambda model, deterministic, bits: [])
    runner = runner_of(checkpoint("llama"))
    with pytest.raises(UnsupportedModel, match="depends on the other rows of its batch"):
        row_check.check_rows(runner)
    allowed = runner_of(checkpoint("llama"), allow_variant_numerics=True)
    row_check.check_rows(allowed)
    assert allowed.numerics == runner.numerics + "+variant", "its blocks are shared with nobody who is steady"


def test_ours_is_taken_where_there_is_one_and_transformers_is_asked_otherwise(checkpoint: Make) -> None:
    native, foreign = checkpoint("llama"), checkpoint("glm4")
    assert ModelConfig.from_directory(native).family == "llama"
    assert ModelConfig.from_directory(native, "transformers").family == "transformers"
    assert ModelConfig.from_directory(foreign).family == "transformers"
    with pytest.raises(UnsupportedModel, match="Glm4ForCausalLM has no native implementation"):
        ModelConfig.from_directory(foreign, "native")
    assert "transformers/" in runner_of(native).numerics


def test_both_implementations_of_a_family_say_the_same(checkpoint: Make) -> None:
    tokens = prompt(512)
    ours, theirs = (
        Oracle(runner_of(checkpoint("llama"), model_impl=impl)).logits(tokens, chunk=24)
        for impl in ("native", "transformers")
    )
    assert distance(ours, theirs.double()) < 5e-5


def test_without_transformers_it_is_said_what_to_install(checkpoint: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = checkpoint("glm4")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install 'looseleaf\[transformers\]'"):
        ModelConfig.from_directory(directory)


def test_a_transformers_that_is_too_old_is_refused(checkpoint: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = checkpoint("glm4")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "5.20.2")
    with pytest.raises(ModelError, match=r"transformers 5\.20\.2 is too old; 5\.21\.1 is needed"):
        ModelConfig.from_directory(directory)
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert set(re.findall(r'"transformers>=([\d.]+)"', project)) == {foreign_config.OLDEST}


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    directory = make_foreign(tmp_path / "m", ZOO["gemma2"])
    tensors = load_file(directory / "model.safetensors")
    name = next(name for name in tensors if "layers.1" in name and "down_proj" in name)
    save_file(
        {n: t for n, t in tensors.items() if n != name}, directory / "model.safetensors", metadata={"format": "pt"}
    )
    with pytest.raises(ModelError, match=r"lacks tensor .*layers\.1.*down_proj"):
        runner_of(directory)


def test_code_of_a_checkpoint_is_not_executed(tmp_path: Path) -> None:
    directory = make_foreign(tmp_path / "m", ZOO["gemma2"])
    (directory / "evil.py").write_text("import pathlib\npathlib.Path(__file__).with_name('ran').touch()\n")
    config = (directory / "config.json").read_text().replace('"model_type": "gemma2"', '"model_type": "evil"')
    config = config.replace("{", '{"auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"},', 1)
    (directory / "config.json").write_text(config.replace("Gemma2ForCausalLM", "EvilForCausalLM"))
    with pytest.raises(UnsupportedModel, match="transformers cannot read"):
        runner_of(directory)
    assert not (directory / "ran").exists()


def test_dummy_weights_and_a_shallow_model(checkpoint: Make) -> None:
    runner = runner_of(checkpoint("gemma3"), load_format="dummy")
    again = runner_of(checkpoint("gemma3"), load_format="dummy")
    tokens = prompt(512, 20)
    assert torch.equal(Oracle(runner).logits(tokens), Oracle(again).logits(tokens))
    whole = Oracle(runner).logits(tokens)
    runner.model = again.model.shallow(2)
    assert not torch.equal(Oracle(runner).logits(tokens), whole)
    runner.model = again.model
    assert torch.equal(Oracle(runner).logits(tokens), whole), "the whole model is as it was"


def test_the_page_of_models_lists_every_family() -> None:
    """`python -m bench.families` writes the table."""
    page = (Path(__file__).parents[2] / "docs/models.md").read_text()
    listed = {line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")}
    assert set(ZOO) | set(REFUSED) <= listed


def test_families_that_miss_the_bound_are_those_in_which_rounding_alone_misses_it() -> None:
    """The distances in the page's table are those of fp32 logits from transformers (`bench.families`)."""
    lines = (Path(__file__).parents[2] / "docs/models.md").read_text().splitlines()
    cells = {(fields := line.split(" | "))[0][2:]: fields for line in lines if " | same, same |" in line}
    far, rounded = ({name: float(fields[column]) for name, fields in cells.items()} for column in (4, 5))
    assert set(far) == set(ZOO) and sum(each <= CLOSE for each in far.values()) >= 45
    assert max(far["mixtral"], far["gpt-oss"]) <= CLOSE
    assert all(rounded[name] > CLOSE for name in far if far[name] > CLOSE)
