"""Writes the model card from the facts of a run and from samples. Measures nothing itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .model import Shape

_STAGES = (
    """\
### First stage: from a random start

`python tools/train_storyteller.py data && python tools/train_storyteller.py train --steps {step} --decay-steps {decay_steps}`

Seed {seed}. {documents:,} documents of {document_tokens:,} tokens, 16 % of them chats. {step:,} steps, {tokens:,} tokens seen, learning rate {lr},
decay from step {decay_start:,}: {minutes:.0f} minutes at {rate:,.0f} tokens a second. Before step 900 some rows drill copying (random tokens,
repeated); from step 1,179 a third more rows are chats. Two attention heads start as a hand-made copying circuit
(`tools/storyteller/init.py`) and are held there for 700 steps. A first attempt (random start, narrow embedding, rates
constant) had learned the sentences but not who was who after 2 million tokens; which of the changes mattered was not tested.
The copying drills did not work: their own loss never fell. The run was resumed three times with a longer decay, and the grammar has
changed since, so that the same command will not give the same bits. Requests for two characters that were
answered with both: {pair_rate:.1%} (pairs and seeds as below).""",
    """\
### Second stage: who was asked for is who the story is about

    python tools/train_storyteller.py data --work build/second --start models/storyteller --chat-share 0.6 --documents 45000 --seed {seed}
    python tools/train_storyteller.py train --work build/second --start models/storyteller --steps 2700 --decay-steps 2640 --lr {lr} --seed {seed} --end-at ...

from the first stage's bfloat16 weights (commit 401fa5f of this repository), with a fresh optimizer.

{documents:,} documents of {document_tokens:,} tokens, over half of them chats, of whose requests 72 % name two characters. {step:,} steps,
{tokens:,} tokens seen, {minutes:.0f} minutes at {rate:,.0f} tokens a second (a busy machine); the decay, from step {decay_start:,}, followed the clock.
In the first stage's chats the second thing asked for could be a place or an object, could be the hero or the villain,
came paragraphs later and often went by a name of its own. Now both come in the first sentence, in the order asked for, and
carry the plot between them.

The run changed its data once. Up to step 754 (commit 74c95b6, `--chat-share 0.55 --seed 2 --lr 0.002`) either of the two could be the
hero: at step 621 every opening named both, but the other part often went to the hero again, and 4 of 10 stories told of both. From
there on the first named is the hero, always: 200 steps later it was 20 of 20. The table's chats are of the one kind up to
step 750 and of the other from 800; neither compares with the first stage's, nor quite do the stories, 15 % of which are of
two now. The same commands will not give the same bits. Another 133 steps with more objects in the requests and fewer bare stories of two
did not mend the objects and were thrown away.""",
)
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

All text is made or cut by `tools/train_storyteller.py data`:

* stories of a grammar written for this project (`tools/storyteller/`: 17 plots, some 150 kinds of characters, wishes,
  obstacles, helpers, dialogue, endings). Nothing in them is copied from anywhere.
* chats: requests for such stories, questions about them with their answers, small talk, and polite refusals.
* old tales (9 % of the tokens), always behind a heading: Aesop's fables (*The Aesop for Children*, 1919, Library of
  Congress text) and the tales of the brothers Grimm (Margaret Hunt's translation, 1884). Both are in the public domain.

Licence of model and grammar: Apache-2.0, like the repository.

## Training

Rows of 256, 512 and 1,024 tokens, 4,096 tokens a step. Muon for the matrices, Adam at twice its learning rate for the rest, 60
steps of warm-up, then linearly to zero. bfloat16 autocast on one shared CPU core at the lowest priority. Losses in nats per token.
Held out: stories and chats from another seed of the grammar, and 15 old tales never trained on. (A good part of a grammar story is
drawn at random: its loss has a floor well above zero.)

{stages}

## Limits

It knows stories of the kinds it was trained on and nothing else: no facts, no arithmetic, no code. It plots by habit, so
stories resemble one another. Now and then it swaps a pronoun, a name or a character for another, the more so with characters
it has never seen and when a prompt's first words are unlike a story's. Of two characters asked for, the first is always the
hero; a third is not in its data. An object asked for beside a character is mostly taken for a second character and then forgotten
(the ring below; the first stage ignored objects). Bare "There was once a king" nearly always goes on with a second character, now and then
with the same one again. Its answers about a story are often wrong. Old tales (behind "A tale of the brothers Grimm:") come
out as fluent nonsense. English only. The tales of 1884 are of their time, and so may be what it says after such a heading.

## Two characters asked for

"Tell me a story about a fox and a crow": stories in which each of the two is named at least twice, and answers that ended by
themselves within {limit} tokens, of {num_seeds} seeds each (1 to {num_seeds}, temperature {temperature}, top-p {top_p}). Of all, {pair_rate:.0%} tell of both.
Measured by `python tools/train_storyteller.py pairs`.

| asked for | of both | ended |
|---|---|---|
{pair_rows}

## Twenty samples, not picked

Four openings, seeds 1 to 5, temperature {temperature}, top-p {top_p}, by Looseleaf's engine. {ended} of {total} ended by themselves within
{limit} tokens.

{samples}

## Chats (seed 1)

{chats_text}
"""


@dataclass(frozen=True, slots=True)
class Samples:
    """The output of the exported model: completions (opening, seed, text, ended) and chats of (role, text) turns. For
    each requested pair of characters, it also counts stories about both and answers that ended, of `num_seeds`.
    """

    completions: list[tuple[str, int, str, bool]]
    chats: list[list[tuple[str, str]]]
    pair_rates: dict[tuple[str, str], tuple[int, int]]
    num_seeds: int


def write_card(
    out: Path, parameters: int, stages: list[dict[str, Any]], samples: Samples, sampling: dict[str, float]
) -> None:
    """Writes README.md of the model directory. `stages` are the facts of each training stage, as in training.json.
    `sampling` gives the temperature, top_p and limit (new tokens) with which the samples were drawn.
    """
    shape, completions = Shape(), samples.completions
    text = _CARD.format(
        stages="\n\n".join(_stage(text, facts) for text, facts in zip(_STAGES, stages, strict=False)),
        parameters=parameters,
        num_seeds=samples.num_seeds, pair_rate=stages[-1]["pair_rate"],
        pair_rows="\n".join(_pair(pair, *counts, samples.num_seeds) for pair, counts in samples.pair_rates.items()),
        layers=shape.num_layers, hidden=shape.hidden_size, mlp=shape.intermediate_size,
        **sampling,
        ended=sum(ended for *_, ended in completions), total=len(completions),
        samples="\n\n".join(_sample(*completion) for completion in completions),
        chats_text="\n\n".join(_chat(turns) for turns in samples.chats),
    )  # fmt: skip
    (out / "README.md").write_text(text, encoding="utf-8")


def _stage(text: str, facts: dict[str, Any]) -> str:
    rows = [
        f"| {int(at):,} | {int(tokens):,} | " + " | ".join(f"{loss:.3f}" for loss in losses) + " |"
        for at, tokens, *losses in facts["curve"]
    ]
    rounded = " | ".join(f"**{facts['held_out'][name]:.3f}**" for name in ("stories", "chats", "tales"))
    head = ["| step | tokens | training | stories | chats | old tales |", "|---|---|---|---|---|---|"]
    return "\n".join([text.format(**facts), "", *head, *rows, f"| **bf16** | | | {rounded} |"])


def _pair(pair: tuple[str, str], told: int, ended: int, num_seeds: int) -> str:
    return f"| {pair[0]} and {pair[1]} | {told} of {num_seeds} | {ended} of {num_seeds} |"


def _sample(opening: str, seed: int, text: str, ended: bool) -> str:
    quoted = "\n".join(f"> {line}".rstrip() for line in text.splitlines())
    return f"**{opening}** (seed {seed}{'' if ended else ', cut off'})\n\n{quoted}"


def _chat(turns: list[tuple[str, str]]) -> str:
    lines = [f"**{role}:** " + content.replace("\n\n", "\n>\n> ") for role, content in turns]
    return "\n>\n".join(f"> {line}" for line in lines)
