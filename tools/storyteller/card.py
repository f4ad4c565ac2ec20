"""Writes the model card from the facts of a run and from samples."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .model import Shape

_STAGES = (
    """\
### First stage: from random weights

`python tools/train_storyteller.py data && python tools/train_storyteller.py train --steps {step} --decay-steps
{decay_steps}`

The seed is {seed}. There are {documents:,} documents with {document_tokens:,} tokens in total; 16 % of the documents
are chats. The run had {step:,} steps with {tokens:,} tokens, and a learning rate of {lr} that decayed from step
{decay_start:,}. It took {minutes:.0f} minutes at {rate:,.0f} tokens per second. Before step 900, some rows are copying
drills (random tokens, repeated). From step 1,179, an additional third of the rows contains only chats. Two attention
heads start as a hand-made copying circuit (`tools/storyteller/init.py`) and are held fixed for 700 steps. After 2
million tokens, a first attempt (random weights, narrow embedding, constant learning rate) had learned the sentences,
but confused the characters. We did not test which of the changes mattered. The copying drills did not work: their own
loss never fell. The run was resumed three times with a longer decay, and the grammar has changed since then, so the
same command does not give the same bits. Of the requests for two characters, {pair_rate:.1%} were answered with a story
about both (pairs and seeds as below).""",
    """\
### Second stage: stories about the requested characters

    python tools/train_storyteller.py data --work build/second --start models/storyteller --chat-share 0.6 --documents \
45000 --seed {seed}
    python tools/train_storyteller.py train --work build/second --start models/storyteller --steps 2700 --decay-steps \
2640 --lr {lr} --seed {seed} --end-at ...

The run started from the first stage's bfloat16 weights (commit 401fa5f of this repository), with a fresh optimizer.

There are {documents:,} documents with {document_tokens:,} tokens in total. More than half of them are chats, and 72 %
of the chats' requests name two characters. The run had {step:,} steps with {tokens:,} tokens, and took {minutes:.0f}
minutes at {rate:,.0f} tokens per second on a busy machine. The decay, which began at step {decay_start:,}, followed the
clock. In the first stage's chats, the second thing in a request could be a place or an object. If it was a character,
it could be the hero or the villain, came paragraphs later, and often had a different name. Now both characters are in
the first sentence, in the order of the request, and the plot is about the two of them.

The data changed once during the run. Up to step 754 (commit 74c95b6, `--chat-share 0.55 --seed 2 --lr 0.002`), either
character could be the hero. At step 621, every opening named both, but the hero often took the other part too, and 4 of
10 stories were about both. After that step, the character that is named first is always the hero. 200 steps later, 20
of 20 stories were about both. The table's chats are of the first kind up to step 750, and of the second kind from step
800 on. Neither kind can be compared with the chats of the first stage. The stories cannot quite be compared either,
because 15 % of them are now about two characters. The same commands do not give the same bits. Another 133 steps, with
more objects in the requests and fewer plain stories about two characters, did not improve the handling of objects, and
were discarded.""",
)
_CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# Storyteller

A Llama model with {parameters:,} parameters that tells short children's stories in plain English. `looseleaf serve` uses
it when no model is named, so that a machine without access to a model hub still produces readable text.

| | |
|---|---|
| architecture | `LlamaForCausalLM`: {layers} layers, hidden {hidden}, MLP {mlp}, 8 heads over 2 KV heads of 32, tied embeddings |
| vocabulary | 2,048 tokens, byte-level BPE; `<s>` begins every text, `</s>` or `<|im_end|>` ends it |
| context | 1,024 tokens; rotary positions, base 100,000 |
| weights | bfloat16, rounded after training; the losses below are those of the rounded weights |
| chat | ChatML-like (`chat_template.jinja`): `<|im_start|>role\\n...<|im_end|>\\n` |

## Data

`tools/train_storyteller.py data` prepares all text:

* stories from a grammar written for this project (`tools/storyteller/`: 17 plots, about 150 kinds of characters, wishes,
  obstacles, helpers, dialogue, endings). Nothing in them is copied from anywhere.
* chats: requests for such stories, questions about them with answers, small talk, and polite refusals.
* old tales (9 % of the tokens), each after a heading: Aesop's fables (*The Aesop for Children*, 1919, Library of Congress
  text) and the tales of the Brothers Grimm (Margaret Hunt's translation, 1884). Both are in the public domain.

The model and the grammar are under the Apache License 2.0, like the repository.

## Training

Rows have 256, 512 or 1,024 tokens, and a step has 4,096 tokens. Muon updates the matrices; Adam, at twice Muon's learning
rate, updates the other parameters. The learning rate rises for 60 steps and, at the end, decays linearly to zero. The
model was trained with bfloat16 autocast on one shared CPU core at the lowest priority. Losses are in nats per token. The
held-out data are stories and chats from a different seed of the grammar, and 15 old tales that were never trained on. (A
large part of each grammar story is random, so its loss cannot come close to zero.)

{stages}

## Limits

The model knows only stories of the kinds on which it was trained: no facts, no arithmetic, no code. Its plots follow a
few patterns, so stories resemble one another. It sometimes confuses pronouns, names or characters, especially if it has
never seen a character, or if a prompt does not begin like a story. Of two requested characters, the first is always the
hero. Its training data contain no requests for three. An object that is requested together with a character is usually
treated as a second character and then forgotten (see the ring below; the first stage ignored objects). The opening "There
was once a king" nearly always continues with a second character, which is sometimes the king again. The model's answers
about a story are often wrong. Old tales (after "A tale of the brothers Grimm:") are fluent nonsense. The model knows only
English. The tales of 1884 reflect the views of their time, and so may text that the model generates after such a heading.

## Requests for two characters

For requests such as "Tell me a story about a fox and a crow", the table shows how many stories name each of the two at
least twice, and how many answers ended by themselves within {limit} tokens. There are {num_seeds} seeds for each pair (1 to {num_seeds},
temperature {temperature}, top-p {top_p}). In total, {pair_rate:.0%} of the stories are about both. These are the results of
`python tools/train_storyteller.py pairs`.

| requested | about both | ended |
|---|---|---|
{pair_rows}

## Twenty samples, not selected

Looseleaf's engine generated five samples for each of four openings, with seeds 1 to 5, temperature {temperature} and top-p {top_p}.
{ended} of {total} samples ended by themselves within {limit} tokens.

{samples}

## Chats (seed 1)

{chats_text}
"""


@dataclass(frozen=True, slots=True)
class Samples:
    """The output of the exported model: completions (opening, seed, text, ended), chats of (role, text) turns, and, for
    each requested pair of characters, how many of `num_seeds` stories were about both and how many ended.
    """

    completions: list[tuple[str, int, str, bool]]
    chats: list[list[tuple[str, str]]]
    pair_rates: dict[tuple[str, str], tuple[int, int]]
    num_seeds: int


def write_card(
    out: Path, parameters: int, stages: list[dict[str, Any]], samples: Samples, sampling: dict[str, float]
) -> None:
    """Writes the model directory's README.md. `stages` are the facts of each training stage, as in training.json.
    `sampling` has the temperature, the top_p and the limit on new tokens with which the samples were drawn.
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
