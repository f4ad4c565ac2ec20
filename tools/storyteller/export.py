"""Exports a checkpoint as a model directory: bf16 weights, configs, tokenizer, model card.

Looseleaf's engine draws the samples in the model card.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from . import pairs
from .card import Samples, write_card
from .chat import CHAT_TEMPLATE
from .data import BOS_ID, CHAT_END_ID, EOS_ID
from .model import Llama, Shape
from .training import Progress, evaluate, load_parameters, read_checkpoint

OPENINGS = ("Once upon a time", "Long ago, in a small village", "There was once a king", "One day, a girl named Lily")
CHAT_PROMPTS = (
    ("Tell me a story about a fox and a crow",),
    ("Can you tell me a tale about a dragon?",),
    ("Write a short story about a girl named Lily and a golden ring.", "Who helped Lily?"),
    ("Who are you?",),
    ("What is the capital of France?",),
)
_QUESTION = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
SEEDS = (1, 2, 3, 4, 5)
TEMPERATURE, TOP_P = 0.7, 0.95
MAX_NEW_TOKENS = 600
PAIR_SEEDS = range(1, 9)
CURVE_ROWS = 12


def export(work: Path, out: Path, start: Path | None, run: dict[str, Any]) -> None:
    """Writes the model directory `out` from the checkpoint in `work`. The model is evaluated after rounding to bf16.

    `start` is the directory from whose weights the run continued; its stages come first in training.json. `run`
    contains the facts that are not in the checkpoint (seed, lr, planned_steps).
    """
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    before = [] if start is None else json.loads((start / "training.json").read_text(encoding="utf-8"))
    tensors, progress = read_checkpoint(work / "checkpoint.safetensors")
    model = Llama(Shape())
    load_parameters(model, {name: t.bfloat16().float() for name, t in tensors.items() if name.startswith("model.")})
    held_out = evaluate(model, dict(np.load(work / "held_out.npz")), torch.device("cpu"))
    print("held-out loss after rounding to bf16:", held_out, flush=True)
    out.mkdir(parents=True, exist_ok=True)
    write_model(model, out)
    write_tokenizer(tokenizer, out)
    said = samples(out, tokenizer)
    told = sum(told for told, _ in said.pair_rates.values())
    pair_rate = told / (len(said.pair_rates) * said.num_seeds)
    stages = [*before, run | run_facts(work, progress) | {"held_out": held_out, "pair_rate": round(pair_rate, 4)}]
    lines = ",\n".join(json.dumps(stage) for stage in stages)
    (out / "training.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    sampling = {"temperature": TEMPERATURE, "top_p": TOP_P, "limit": MAX_NEW_TOKENS}
    write_card(out, sum(p.numel() for p in model.parameters()), stages, said, sampling)


def run_facts(work: Path, progress: Progress) -> dict[str, Any]:
    """Returns the facts of a stage for training.json: data, schedule, speed, and some points of the loss curve."""
    decay_start = progress.step if progress.decay_start is None else progress.decay_start
    return {
        "documents": len(np.load(work / "lengths.npy")),
        "document_tokens": int(np.load(work / "lengths.npy").sum()),
        "step": progress.step,
        "decay_start": decay_start,
        "decay_steps": progress.step - decay_start,
        "tokens": progress.tokens,
        "rate": progress.tokens / max(progress.seconds, 1e-9),
        "minutes": progress.seconds / 60,
        "curve": thin(progress.curve or []),
    }


def thin(rows: list[list[float]]) -> list[list[float]]:
    """Returns some rows of a loss curve at equal distances, and the last row. The number is about CURVE_ROWS for a long
    curve.
    """
    step = max(1, len(rows) // CURVE_ROWS)
    return rows[:-1:step] + rows[-1:]


def write_model(model: Llama, out: Path) -> None:
    """Writes config.json, generation_config.json and model.safetensors in transformers' format."""
    weights = {name: p.detach().bfloat16().contiguous() for name, p in model.named_parameters()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    _write_json(out / "config.json", model.shape.hf_config(BOS_ID, EOS_ID))
    generation = {
        "bos_token_id": BOS_ID,
        "eos_token_id": [EOS_ID, CHAT_END_ID],
        "do_sample": True,
        "temperature": TEMPERATURE,
        "top_p": TOP_P,
    }
    _write_json(out / "generation_config.json", generation)


def write_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    tokenizer.save(str(out / "tokenizer.json"))
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
            "add_bos_token": True,
            "clean_up_tokenization_spaces": False,
            "model_max_length": Shape().max_len,
        },
    )
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def samples(directory: Path, tokenizer: Tokenizer) -> Samples:
    """Returns completions, chats and pair rates of the exported model."""
    teller = Teller(directory, tokenizer)
    completions = []
    for opening in OPENINGS:
        for seed in SEEDS:
            text, ended = teller.complete(opening, seed)
            completions.append((opening, seed, opening + text, ended))
    chats = [teller.chat(questions) for questions in CHAT_PROMPTS]
    return Samples(completions, chats, pairs.rates(teller.answer, PAIR_SEEDS), len(PAIR_SEEDS))


class Teller:
    """The exported model in Looseleaf's engine, with the exported sampling settings."""

    def __init__(self, directory: Path, tokenizer: Tokenizer) -> None:
        sys.path.append(
            str(Path(__file__).resolve().parents[2])
        )  # the repository, so that the script runs from any directory
        from engine.model_runner import ModelRunner, RunnerSettings
        from testing.oracle import Oracle

        self._tokenizer = tokenizer
        self._oracle = Oracle(ModelRunner(RunnerSettings(directory, num_threads=1)))

    def complete(self, prompt: str, seed: int, *, add_bos: bool = True) -> tuple[str, bool]:
        """Returns the continuation of the prompt, and whether it ended before the limit."""
        from common.types import SamplingParams, StoppingParams

        ids = self._tokenizer.encode(prompt, add_special_tokens=add_bos).ids
        stopping = StoppingParams(max_tokens=MAX_NEW_TOKENS, stop_token_ids=(EOS_ID, CHAT_END_ID))
        output = self._oracle.generate(ids, SamplingParams(temperature=TEMPERATURE, top_p=TOP_P, seed=seed), stopping)
        return self._tokenizer.decode(output), output[-1] in stopping.stop_token_ids

    def answer(self, question: str, seed: int, before: str = "<s>") -> tuple[str, bool]:
        """Returns (answer to a question after the rendered turns `before`, whether it ended before the limit)."""
        return self.complete(f"{before}{_QUESTION.format(question)}", seed, add_bos=False)

    def chat(self, questions: tuple[str, ...], seed: int = 1) -> list[tuple[str, str]]:
        prompt, turns = "<s>", list[tuple[str, str]]()
        for question in questions:
            answer, _ = self.answer(question, seed, prompt)
            prompt += _QUESTION.format(question)
            prompt += f"{answer}<|im_end|>\n"
            turns += [("user", question), ("assistant", answer)]
        return turns


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
