"""The model card, written from the facts of a run and from samples. Knows how to say, not how to measure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .model import Shape

_CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# Storyteller

A Llama of {parameters:,} parameters that tells short children's stories in plain English. It is what `looseleaf serve`
serves when no model is named, so that a machine that can reach no model hub still gets readable text.

| | |
|---|---|
| architecture | `LlamaForCausalLM`: {layers} layers, hidden {hidden}, MLP {mlp}, 8 heads over 2 KV heads of 32, tied embeddings |
| vocabulary | 2,048 tokens, byte-level BPE; `<s>` begins every text, `</s>` or `<|im_end|>` ends it |
| context | 1,024 tokens; rotary positions, base 100,000 |
| weights | bfloat16, rounded after training; the losses below are those of the rounded weights |
| chat | ChatML-like (`chat_template.jinja`): `<|im_start|>role\\n...<|im_end|>\\n` |

## Data

{documents:,} documents, {document_tokens:,} tokens, all made or cut by `tools/train_storyteller.py data`:

* about 75 %: stories of a grammar written for this project (`tools/storyteller/`: 17 plots, some 150 kinds of
  characters, wishes, obstacles, helpers, dialogue, endings). Nothing in them is copied from anywhere.
* about 16 %: chats: requests for such stories, questions about them with their answers, small talk, and polite refusals.
* about 9 %: old tales, always behind a heading: Aesop's fables (*The Aesop for Children*, 1919, Library of Congress
  text) and the tales of the brothers Grimm (Margaret Hunt's translation, 1884). Both are in the public domain.

Licence of model and grammar: Apache-2.0, like the repository.

## Training

Seed {seed}. {step:,} steps of 4,096 tokens, {tokens:,} tokens seen, in rows of 256, 512 and 1,024 (before step 900 some
rows drill copying: random tokens, repeated; from step 1,179 a third more rows are chats). Muon for the matrices, Adam for the rest; learning rates 0.003 and 0.006 after 60
steps of warm-up, linearly to zero from step {decay_start:,}. bfloat16 autocast on one shared CPU core at the lowest
priority: {minutes:.0f} minutes at {rate:,.0f} tokens a second. Two attention heads start as a hand-made copying circuit
(`tools/storyteller/init.py`) and are held there for 700 steps. A first attempt (random start, narrow embedding, rates
constant) had learned the sentences but not who was who after 2 million tokens; which of the changes mattered was not tested.
The copying drills did not work: their own loss never fell. The run was resumed three times with a longer decay, so that the
same command will not give the same bits:
`python tools/train_storyteller.py data && python tools/train_storyteller.py train --steps {step} --decay-steps {decay_steps}`.

Loss in nats per token. Held out: stories and chats from another seed of the grammar, and 15 old tales never trained on.

| step | tokens | training | stories | chats | old tales |
|---|---|---|---|---|---|
{curve}
| **bf16** | | | **{stories:.3f}** | **{chats:.3f}** | **{tales:.3f}** |

(A good part of a grammar story is drawn at random: its loss has a floor well above zero.)

## Limits

It knows stories of the kinds it was trained on and nothing else: no facts, no arithmetic, no code. It plots by habit, so
stories resemble one another. Now and then it swaps a pronoun, a name or a character for another, the more so with characters
it has never seen and when a prompt's first words are unlike a story's. Of two characters asked for in a chat often only one
comes (eight seeds each: fox and crow, one in 8 and both in 3; cat and mouse, 7 and 1; king and dragon, 4 and 0), objects
asked for are mostly ignored, and its answers about a story are often wrong. Old tales (behind "A tale of the brothers Grimm:") come
out as fluent nonsense. English only. The tales of 1884 are of their time, and so may be what it says after such a heading.

## Twenty samples, not picked

Four openings, seeds 1 to 5, temperature {temperature}, top-p {top_p}, by Looseleaf's engine. {ended} of {total} ended by themselves within
{limit} tokens.

{samples}

## Chats (seed 1)

{chats_text}
"""


def write_card(
    out: Path,
    facts: dict[str, Any],
    completions: list[tuple[str, int, str, bool]],
    chats: list[list[tuple[str, str]]],
    sampling: dict[str, float],
) -> None:
    """README.md of the model directory. `completions`: (opening, seed, text, ended); `chats`: (role, text) turns;
    `sampling`: temperature, top_p and limit (new tokens) they were drawn with."""
    shape, held_out = Shape(), facts["held_out"]
    text = _CARD.format(
        **{name: value for name, value in facts.items() if name not in ("curve", "held_out")},
        curve=_curve(facts["curve"]),
        layers=shape.num_layers, hidden=shape.hidden_size, mlp=shape.intermediate_size,
        decay_steps=facts["step"] - (facts["decay_start"] or 0),
        stories=held_out["stories"], chats=held_out["chats"], tales=held_out["tales"],
        **sampling,
        ended=sum(ended for *_, ended in completions), total=len(completions),
        samples="\n\n".join(_sample(*completion) for completion in completions),
        chats_text="\n\n".join(_chat(turns) for turns in chats),
    )  # fmt: skip
    (out / "README.md").write_text(text, encoding="utf-8")


def _curve(rows: list[list[float]]) -> str:
    """At most a dozen rows of the loss curve, the last one always among them."""
    step = max(1, len(rows) // 11)
    kept = rows[::step] if rows[-1] in rows[::step] else [*rows[::step], rows[-1]]
    return "\n".join(
        f"| {int(at):,} | {int(tokens):,} | " + " | ".join(f"{loss:.3f}" for loss in losses) + " |"
        for at, tokens, *losses in kept
    )


def _sample(opening: str, seed: int, text: str, ended: bool) -> str:
    quoted = "\n".join(f"> {line}".rstrip() for line in text.splitlines())
    return f"**{opening}** (seed {seed}{'' if ended else ', cut off'})\n\n{quoted}"


def _chat(turns: list[tuple[str, str]]) -> str:
    lines = [f"**{role}:** " + content.replace("\n\n", "\n>\n> ") for role, content in turns]
    return "\n>\n".join(f"> {line}" for line in lines)
