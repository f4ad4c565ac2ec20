"""Creates the training data: stories, chats and old tales, the tokenizer, and rows of equal length.

Every document begins with <s>. Old tales have a heading, so that the model can learn to use their wording only after
such a heading.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from . import chat
from .grammar import Story, draw_leads
from .plots import PLOTS, castings

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
BOS_ID, EOS_ID, CHAT_START_ID, CHAT_END_ID = 1, 2, 3, 4
TALE_CHARS = 2800
"""The approximate length of a piece of an old tale, in characters. Pieces end at the end of a paragraph."""
TALE_SHARE = 0.045
PAIR_NAMED = 0.15
"""The share of characters with a proper name if two are requested. It is low, because a proper name hides the kind that
was requested.
"""


@dataclass(frozen=True, slots=True)
class Tales:
    """The public-domain texts as documents. `held_out` contains complete fables and tales that are not used for
    training.
    """

    aesop: list[str]
    grimm: list[str]
    held_out: list[str]


def make_story(rng: random.Random, num_leads: int = 0) -> Story:
    """Returns a story. If `num_leads` is 1 or 2, that many leads are drawn in advance; otherwise, the plot draws all of
    its characters.
    """
    if num_leads:
        leads = draw_leads(rng, num_leads, PAIR_NAMED if num_leads == 2 else None)
        told = castings(leads)
        name, cast, _ = rng.choices(told, [share for *_, share in told])[0]
        story = Story(rng, name, cast)
    else:
        name = rng.choices(list(PLOTS), [weight for _, weight in PLOTS.values()])[0]
        story = Story(rng, name)
    PLOTS[name][0](story)
    return story


def story_document(rng: random.Random) -> str:
    """Returns a story as a document. A few stories lack their first paragraph, so that the model also learns to
    continue a text that does not begin like a story.
    """
    story = make_story(rng, num_leads=2 if rng.random() < 0.15 else 0)
    if rng.random() < 0.06 and len(story.paragraphs) > 2:
        del story.paragraphs[0]
    return f"<s>{story.text(_separator(rng))}</s>"


def chat_document(rng: random.Random) -> str:
    if rng.random() < 0.15:
        return chat.chatter(rng)
    count = 2 if rng.random() < 0.15 else 1
    num_leads = rng.choices((0, 1, 2), (6, 22, 72), k=count)
    return chat.conversation(rng, [make_story(rng, num) for num in num_leads], _separator(rng))


def _separator(rng: random.Random) -> str:
    return "\n\n" if rng.random() < 0.6 else " "


def read_tales(folder: Path) -> Tales:
    """Reads Aesop's fables (`aesop_for_children.json`) and the tales of the brothers Grimm (`grimm.txt`) from `folder`.
    Holds out the first of every 25 fables, and the first of every 25 tales.
    """
    fables = json.loads((folder / "aesop_for_children.json").read_text(encoding="utf-8"))
    aesop = [f"<s>A fable of Aesop: {f['title']}\n\n{f['fable']}\n\nThe lesson: {f['lesson']}</s>" for f in fables]
    grimm: list[list[str]] = []
    for tale in (folder / "grimm.txt").read_text(encoding="utf-8").split("=== ")[1:]:
        title, _, body = tale.partition("\n")
        grimm.append(_pieces(title.strip(), body))
    held = aesop[::25] + [piece for tale in grimm[::25] for piece in tale]
    kept = [piece for i, tale in enumerate(grimm) if i % 25 for piece in tale]
    return Tales([text for i, text in enumerate(aesop) if i % 25], kept, held)


def _pieces(title: str, body: str) -> list[str]:
    pieces, current = [], ""
    for paragraph in (p.strip() for p in body.split("\n") if p.strip()):
        if current and len(current) + len(paragraph) > TALE_CHARS:
            pieces.append(current)
            current = ""
        current = f"{current}\n\n{paragraph}" if current else paragraph
    pieces.append(current)
    last = len(pieces) - 1
    return [
        f"<s>A tale of the brothers Grimm: {title}\n\n{text}{'</s>' if i == last else ''}"
        for i, text in enumerate(pieces)
    ]


def documents(rng: random.Random, tales: Tales, num: int, chat_share: float) -> Iterator[str]:
    """Yields `num` documents: chats, old tales (about 4.5 % of the documents), and stories."""
    for _ in range(num):
        draw = rng.random()
        if draw < TALE_SHARE:
            yield rng.choice(tales.aesop if rng.random() < 0.45 else tales.grimm)
        elif draw < TALE_SHARE + chat_share:
            yield chat_document(rng)
        else:
            yield story_document(rng)


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Returns a byte-level BPE trained on `texts`. Its first tokens are the special ones. It adds <s> before a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    plain = (_without_special(text) for text in texts)
    tokenizer.train_from_iterator(plain, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS_ID)]
    )
    return tokenizer


def _without_special(text: str) -> str:
    for token in SPECIAL_TOKENS:
        text = text.replace(token, "")
    return text


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    """Returns the token ids of documents that contain their special tokens as text."""
    return [np.array(e.ids, np.int32) for e in tokenizer.encode_batch(texts, add_special_tokens=False)]


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the curriculum, which ends before step `until`.

    Drills are rows of random tokens that repeat. They were meant to teach copying, but did not: their held-out loss
    never fell.
    """

    until: float
    row_shares: dict[int, float]
    """The share of the steps by length of their rows. Long rows teach the late positions."""
    drill_share: float
    """The share of a step's rows that are drills."""
    chat_share: float = 0.0
    """The share of a step's rows that contain only chats, in addition to those among the documents."""


TUNING = (Stage(math.inf, {256: 0.15, 512: 0.7, 1024: 0.15}, 0.0),)
CURRICULUM = (
    Stage(300, {256: 0.7, 512: 0.2, 1024: 0.1}, 0.125),
    Stage(900, {256: 0.6, 512: 0.3, 1024: 0.1}, 0.0625),
    Stage(1179, {256: 0.5, 512: 0.3, 1024: 0.2}, 0.0),
    Stage(math.inf, {256: 0.2, 512: 0.7, 1024: 0.1}, 0.0, 0.375),
)


def drill_row(rng: np.random.Generator, length: int, vocab_size: int) -> np.ndarray:
    """Returns a drill [length + 1]: <s>, followed by repetitions of a random sequence of 4 to 64 ordinary tokens."""
    period = int(rng.integers(4, 65))
    tokens = rng.integers(len(SPECIAL_TOKENS), vocab_size, period)
    row = np.concatenate([[BOS_ID], np.tile(tokens, length // period + 1)])
    return row[: length + 1].astype(np.int32)


@dataclass(slots=True)
class _Cursor:
    """A position in an endless cycle through some of the documents."""

    order: Sequence[int]
    at: int = 0


class Batches:
    """An endless source of batches of about `batch_tokens` tokens. All rows of a batch have the same length."""

    def __init__(
        self, docs: list[np.ndarray], batch_tokens: int, seed: int, vocab_size: int, curriculum: Sequence[Stage]
    ) -> None:
        self._curriculum = curriculum
        self._docs, self._batch_tokens, self._vocab_size = docs, batch_tokens, vocab_size
        self._rng, self._drill_rng = random.Random(seed), np.random.default_rng(seed)
        self._step = 0
        self._all = _Cursor(range(len(docs)))
        self._chats = _Cursor([i for i, doc in enumerate(docs) if doc[1] == CHAT_START_ID])

    def next(self) -> np.ndarray:
        """Returns the next batch, int32 [batch, length + 1]."""
        stage = next(stage for stage in self._curriculum if self._step < stage.until)
        length = self._rng.choices(list(stage.row_shares), list(stage.row_shares.values()))[0]
        size = self._batch_tokens // length
        num_drills, num_chats = round(size * stage.drill_share), round(size * stage.chat_share)
        self._step += 1
        rows = [drill_row(self._drill_rng, length, self._vocab_size) for _ in range(num_drills)]
        rows += [self._row(self._chats, length) for _ in range(num_chats)]
        return np.stack(rows + [self._row(self._all, length) for _ in range(size - len(rows))])

    def _row(self, cursor: _Cursor, length: int) -> np.ndarray:
        """Returns a row [length + 1] that starts at the beginning of a document. If the row ends within a document
        other than its first, the cursor's next row starts with that document.
        """
        parts, size = [], 0
        while size <= length:
            parts.append(self._docs[cursor.order[cursor.at % len(cursor.order)]])
            size += len(parts[-1])
            cursor.at += 1
        if size > length + 1 and len(parts) > 1:
            cursor.at -= 1
        return np.concatenate(parts)[: length + 1]
