"""The model and the script of the scripted workers in `testing.gateway.scripted_workers`. Unless the script gives a
token, it is a function of the sequence's last eight tokens, its length and the sample, so that tests can compute it. A
beam has the tokens of the sample whose index is the beam's rank.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from common.errors import LooseleafError
from common.types import Role, WorkerRecord
from gateway.intake.assets import ModelAssets
from protos.v1 import decode_pb2, prefill_pb2
from protos.v1 import types_pb2 as pb

VOCAB_SIZE = 400
BLOCK_SIZE = 16
BOS_ID, EOS_ID = 1, 2
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer() -> Tokenizer:
    """Returns a byte-level BPE tokenizer that puts <s> before a text. Its training text yields only 300 of the
    VOCAB_SIZE tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(
        ["the old mill turned when the wind was strong and stood still when it was not"] * 20, trainer
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS_ID)])
    return tokenizer


def make_assets(**overrides: Any) -> ModelAssets:
    values: dict[str, Any] = {
        "name": "tiny", "tokenizer": make_tokenizer(), "vocab_size": VOCAB_SIZE, "max_position": 512,
        "eos_token_ids": (EOS_ID,), "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    return ModelAssets(**{**values, **overrides})


def next_id(ids: Sequence[int], sample: int = 0) -> int:
    """Returns the token after `ids`, which is never a special token. About a quarter of the tokens are unknown to the
    tokenizer and have no text, as in the padded vocabularies of real models.
    """
    mixed = sum((i + 1) * t for i, t in enumerate(ids[-8:])) * 31 + len(ids) * 7 + sample * 101
    return 3 + mixed % (VOCAB_SIZE - 3)


def expected_ids(prompt: Sequence[int], count: int, sample: int = 0) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_id(ids, sample))
    return ids[len(prompt) :]


def expected_embedding(prompt: Sequence[int]) -> list[float]:
    """Returns the embedding of a prompt, a vector of length 1 with four fp32 values."""
    values = [float(len(prompt)), *(float(token) for token in (0, 0, 0, *prompt)[-3:])]
    length = math.hypot(*values)
    return array("f", [value / length for value in values]).tolist()


def beam_score(rank: int) -> float:
    return -0.5 * (rank + 1)


@dataclass(slots=True)
class Fault:
    """A fault in one submitted group. The worker performs `action` after `after` steps."""

    action: str
    """One of: none, reject, die, gap (a step is not sent), repeat (a step is sent twice), stray (an output of another
    attempt), silence (no more tokens), freeze (no heartbeats either).
    """
    after: int = 2
    rejection: int = decode_pb2.REJECTION_UNSPECIFIED


@dataclass(slots=True)
class Script:
    """A script for the workers. It lists their faults in the order of the calls, and records the calls."""

    submits: list[Fault] = field(default_factory=list)
    prefills: list[LooseleafError | float] = field(default_factory=list)
    """For each call of prefill, the error to raise, or the duration of the call in seconds."""
    cached_tokens: int = 0
    """Number of tokens of every prompt that prefill workers report as cached."""
    step_s: float = 0.0
    prefill_heartbeats: bool = True
    timings: pb.Timings = field(default_factory=lambda: pb.Timings(hand_over_ns=3_000_000, decode_ns=4_000_000))
    """The timings that decode workers report at a sample's end."""
    says: Sequence[int] = ()
    """The first tokens of every sample, for any prompt."""
    burst: bool = False
    """Whether all tokens of a submit are sent in one message, as they are after the gateway has been slow."""
    load: pb.WorkerLoad = field(default_factory=pb.WorkerLoad)
    """The load that decode workers report with their steps, excluding the running sequences."""
    prefilled: list[prefill_pb2.PrefillRequest] = field(default_factory=list)
    submitted: list[decode_pb2.Submit] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    cancelled_samples: list[tuple[int, int]] = field(default_factory=list)
    """The cancelled samples, as (handle, sample)."""
    prefills_cancelled: int = 0

    def draw(self, prompt: Sequence[int], outputs: Sequence[int], sample: int) -> int:
        """Returns the token that follows `outputs`."""
        return self.says[len(outputs)] if len(outputs) < len(self.says) else next_id([*prompt, *outputs], sample)


def make_record(role: Role, name: str, **overrides: Any) -> WorkerRecord:
    """Returns the record of a worker in a process of its own, at an address where nothing listens."""
    a, b, c, _ = crc32(name.encode()).to_bytes(4)
    values: dict[str, Any] = {
        "worker_id": name, "role": role, "address": f"127.{a}.{b}.{c}:1", "model": "tiny", "arena_id": "a",
        "block_size": BLOCK_SIZE, "pairing": "p", "hash_domain": "00", "max_model_len": 512, "max_num_seqs": 8,
    }  # fmt: skip
    return WorkerRecord(**{**values, **overrides})
