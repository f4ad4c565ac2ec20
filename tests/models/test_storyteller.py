"""The built-in model: its directory is complete, its logits are those of transformers, its stories and answers are
complete.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from common.types import SamplingParams, StoppingParams
from engine.config import ModelConfig
from engine.model_runner import ModelRunner, RunnerSettings
from gateway.intake.assets import load_assets
from gateway.intake.chat_template import ChatTemplate
from testing.oracle import Oracle
from tools.storyteller import pairs

DIRECTORY = Path(__file__).resolve().parents[2] / "models" / "storyteller"
OPENINGS = ("Once upon a time", "Long ago, in a small village", "There was once a king", "One day, a girl named Lily")
NEW_TOKENS = 64
BF16_TIE = 0.15
"""The approximate largest difference in the bf16 logits of this model. Only choices between closer logits
may differ.
"""
MAX_STORY = 500


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))


@pytest.fixture(scope="module")
def teller() -> Oracle:
    return Oracle(ModelRunner(RunnerSettings(DIRECTORY, num_threads=1)))


@pytest.fixture(scope="module")
def reference() -> Any:
    """transformers' model in fp32. Checks that it loaded every tensor."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(DIRECTORY, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    return model.eval()


def chat_ids(tokenizer: Tokenizer, *contents: str) -> list[int]:
    """Returns the prompt ids of a chat, as in the gateway. The contents are from user and assistant in turn."""
    assets = load_assets(str(DIRECTORY))
    assert assets.chat_template is not None
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    text = ChatTemplate(assets.chat_template, assets.special_tokens).render(messages)
    return tokenizer.encode(text, add_special_tokens=False).ids


def tell(teller: Oracle, ids: list[int], seed: int | None, max_tokens: int = MAX_STORY) -> list[int]:
    """Returns output ids with the model's sampling settings, or greedy ids if there is no seed."""
    assets = load_assets(str(DIRECTORY))
    sampling = SamplingParams(temperature=0.0)
    if seed is not None:
        defaults = assets.defaults
        sampling = SamplingParams(temperature=defaults.temperature, top_p=defaults.top_p, seed=seed)
    return teller.generate(ids, sampling, StoppingParams(max_tokens, stop_token_ids=assets.eos_token_ids))


def test_directory_is_complete_and_small() -> None:
    config = ModelConfig.from_directory(DIRECTORY)
    assert (config.num_heads, config.num_kv_heads, config.tie_embeddings) == (8, 2, True)
    assert 2048 <= config.vocab_size <= 4096 and config.max_model_len >= 1024
    assert config.checkpoint_dtype == "bfloat16"
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        assert (DIRECTORY / name).is_file(), name
    assert (DIRECTORY / "README.md").is_file()
    assert sum(file.stat().st_size for file in DIRECTORY.iterdir()) <= 16 << 20


def test_parameter_count(reference: Any) -> None:
    assert 3e6 <= reference.num_parameters() <= 8e6


def test_assets_name_both_ends_and_the_sampling_settings(tokenizer: Tokenizer) -> None:
    assets = load_assets(str(DIRECTORY))
    assert assets.eos_token_ids == (tokenizer.token_to_id("</s>"), tokenizer.token_to_id("<|im_end|>"))
    assert (assets.defaults.temperature, assets.defaults.top_p) == (0.7, 0.95)
    assert assets.special_tokens["bos_token"] == "<s>"
    raw = json.loads((DIRECTORY / "config.json").read_text(encoding="utf-8"))
    assert raw["bos_token_id"] == tokenizer.token_to_id("<s>")


def test_tokenizer_begins_with_bos_and_gives_any_text_back(tokenizer: Tokenizer) -> None:
    for text in ("Once upon a time", "Grüße, 日本 \N{FOX FACE}!", " two  spaces\n\nand lines"):
        ids = tokenizer.encode(text).ids
        assert ids[0] == tokenizer.token_to_id("<s>")
        assert tokenizer.decode(ids) == text


def test_transformers_tokenizer_and_template_agree_with_the_gateway(tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(DIRECTORY)
    assert theirs("Once upon a time")["input_ids"] == tokenizer.encode("Once upon a time").ids
    message = [{"role": "user", "content": "Tell me a story about a fox and a crow"}]
    text = theirs.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    assert tokenizer.encode(text, add_special_tokens=False).ids == chat_ids(tokenizer, message[0]["content"])


@torch.inference_mode()
def test_greedy_tokens_are_those_of_transformers_in_fp32(tokenizer: Tokenizer, reference: Any) -> None:
    ours = Oracle(ModelRunner(RunnerSettings(DIRECTORY, dtype="float32", num_threads=1)))
    prompts = [tokenizer.encode(text).ids for text in OPENINGS[:3]]
    for ids in (*prompts, chat_ids(tokenizer, "Tell me a story about a cat")):
        output = ours.generate(ids, SamplingParams(temperature=0.0), StoppingParams(NEW_TOKENS))
        theirs = reference.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), do_sample=False, temperature=None, top_p=None,
            max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, eos_token_id=None,
        )  # fmt: skip
        assert output == theirs[0, len(ids) :].tolist()


@torch.inference_mode()
def test_greedy_tokens_in_bf16_differ_only_at_ties(tokenizer: Tokenizer, teller: Oracle, reference: Any) -> None:
    for text in OPENINGS:
        ids = tokenizer.encode(text).ids
        output = teller.generate(ids, SamplingParams(temperature=0.0), StoppingParams(NEW_TOKENS))
        rows = reference(torch.tensor([ids + output])).logits[0, len(ids) - 1 : -1]  # [new, vocab]
        chosen = rows.gather(1, torch.tensor(output)[:, None])[:, 0]
        assert float((rows.max(1).values - chosen).max()) < BF16_TIE
        assert int((rows.argmax(1) == torch.tensor(output)).sum()) >= NEW_TOKENS - 3


def test_stories_end_by_themselves_in_whole_sentences(tokenizer: Tokenizer, teller: Oracle) -> None:
    ended, eos = 0, load_assets(str(DIRECTORY)).eos_token_ids
    samples = [(opening, seed) for opening in OPENINGS for seed in (1, 2)]
    for opening, seed in samples:
        output = tell(teller, tokenizer.encode(opening).ids, seed)
        text = opening + tokenizer.decode(output)
        ended += output[-1] in eos and len(output) >= 60 and text.rstrip().endswith((".", "!", "?", '"'))
        assert text.count('"') % 2 == 0 or output[-1] not in eos, text
    assert ended >= len(samples) - 1


def test_a_girl_is_called_she(tokenizer: Tokenizer, teller: Oracle) -> None:
    """The pronouns in the first paragraph after "a little girl named Lily" are feminine."""
    good = 0
    for seed in range(1, 6):
        ids = tokenizer.encode("Once upon a time, there was a little girl named Lily.").ids
        text = tokenizer.decode(tell(teller, ids, seed, 30))
        words = re.findall(r"\b(she|her|he|his|him)\b", text.lower())
        good += bool(words) and words[0] in ("she", "her")
    assert good >= 4


@pytest.mark.parametrize("pair, least", [(("fox", "crow"), 4), (("cat", "mouse"), 3), (("king", "dragon"), 3)])
def test_chat_tells_of_both_who_were_asked_for_and_stops(
    tokenizer: Tokenizer, teller: Oracle, pair: tuple[str, str], least: int
) -> None:
    """Tests greedy decoding and three seeds. The model card has the results for more pairs and seeds."""
    ids = chat_ids(tokenizer, pairs.request(pair))
    told = 0
    for seed in (None, 1, 2, 3):
        output = tell(teller, ids, seed)
        assert output[-1] == tokenizer.token_to_id("<|im_end|>") and 60 < len(output) < MAX_STORY
        told += pairs.tells_of(tokenizer.decode(output), pair)
    assert told >= least


def test_chat_tells_of_the_one_who_was_asked_for(tokenizer: Tokenizer, teller: Oracle) -> None:
    for noun in ("dragon", "rabbit", "princess"):
        output = tell(teller, chat_ids(tokenizer, f"Tell me a story about a {noun}"), 1)
        assert output[-1] == tokenizer.token_to_id("<|im_end|>")
        assert noun in re.split(r"(?<=[.!?])", tokenizer.decode(output))[0]


def test_chat_answers_a_question_about_its_story_in_one_sentence(tokenizer: Tokenizer, teller: Oracle) -> None:
    story = (
        "Once upon a time, there was a little girl named Lily. She had a golden ring that her grandmother had "
        "given her. One day, Lily was playing by the pond with the ring when it slipped and fell into the "
        "pond. She did all she could to reach it, but the pond was too deep. Soon Lily met a kind frog on the "
        'path. "Why are you crying?" asked the frog. "My ring is at the bottom of the pond and I cannot reach '
        'it," said Lily. "Do not worry," said the frog. "I can help you." The frog dived into the pond '
        "without a sound. Soon he came back with the ring. Lily was so happy that she danced."
    )
    ids = chat_ids(tokenizer, "Tell me a story about a girl named Lily and a frog.", story, "Who helped Lily?")
    output = tell(teller, ids, None)
    assert output[-1] == tokenizer.token_to_id("<|im_end|>") and len(output) < 40
    assert "frog" in tokenizer.decode(output)
