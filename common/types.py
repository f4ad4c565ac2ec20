"""Defines types that several packages share, mostly frozen dataclasses (long: many small types).

The types do not depend on protobuf (see `common.convert`), torch or Redis. Lengths and `block_size` are in tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Literal, NamedTuple, NewType, cast

from common.kv_retention import KvRules, Retention

TokenId = NewType("TokenId", int)
BlockId = NewType("BlockId", int)
Generation = NewType("Generation", int)
Epoch = NewType("Epoch", int)
PrefixHash = NewType("PrefixHash", bytes)

DType = Literal["bfloat16", "float32", "float16", "float8_e4m3fn", "int8"]
"""Data types of weights, activations and KV, by torch's names; float8_e4m3fn and int8 are for KV only."""
DTYPE_BYTES: dict[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "int8": 1}
KV_SCALE_BYTES: dict[str, int] = {"int8": 4}
"""Bytes of the scale that follows the keys or values of one token and head (`kernels.kv_cache`). A type that is not in
this table has no scale.
"""
KvCacheDType = Literal["auto", "bfloat16", "int8", "fp8", "fp8_e4m3"]
"""Types of KV that a user can choose, by vLLM's names. auto means the model's dtype, and fp8 means fp8_e4m3."""


def kv_dtype(chosen: KvCacheDType, dtype: DType) -> DType:
    """Returns the type in which keys and values are stored, for a model that computes in `dtype`."""
    named: dict[str, DType] = {"auto": dtype, "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"}
    return named.get(chosen) or cast(DType, chosen)


Role = Literal["prefill", "decode"]
GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "lark"]
Pooling = Literal["last", "mean"]
"""The method by which a text's hidden states become its embedding: the last state, or the mean of all states."""
EarlyStopping = Literal[True, False, "never"]
"""When a beam search stops, as in transformers: as soon as enough beams have ended (True), by a heuristic (False), or
when no running beam can win any more ("never").
"""


class BlockRef(NamedTuple):
    """A reference to one allocation of a block: the block's number in the arena, and the allocation's generation."""

    block: int
    generation: int


class KvKind(str, Enum):
    """The kind of a KV group, which keeps all positions, those of a window, or a recurrent state."""

    FULL = "full"
    SLIDING = "sliding"
    STATE = "state"
    """A recurrent state instead of keys and values. A block contains the state after the block's last computed
    position.
    """


@dataclass(frozen=True, slots=True)
class KvSpec:
    """Describes the content of a KV group's blocks, for all layers of the group."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: DType
    kind: KvKind = KvKind.FULL
    window: int | None = None
    """Sliding window in tokens, or None if there is no window."""
    state_bytes: int = 0
    """Size of one layer's recurrent state, or 0 for attention."""

    @property
    def bytes_per_token(self) -> int:
        """The size of one position's keys and values: 2 * layers * kv_heads * bytes of a row."""
        return 2 * self.num_layers * self.num_kv_heads * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """The size of the keys, or values, of one position and head in one layer, including any scale."""
        return self.head_dim * DTYPE_BYTES[self.dtype] + KV_SCALE_BYTES.get(self.dtype, 0)

    def block_bytes(self, block_size: int) -> int:
        return self.num_layers * self.state_bytes or self.bytes_per_token * block_size

    @property
    def retention(self) -> Retention:
        """The rule that says which blocks of a sequence the group keeps."""
        return Retention(1 if self.kind is KvKind.STATE else self.window)


KvOrder = Literal["heads_first", "slots_first", "words_first"]


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The memory layout of the blocks of all KV groups. A block of keys and values has the shape [layers, 2, kv_heads,
    block_size, head_dim] if `order` is "heads_first". With "slots_first", block_size precedes kv_heads. With
    "words_first", the keys of a head are [head_dim / x, block_size, x] with x numbers in 32 bits. With int8, a scale
    follows the head_dim numbers of each row.
    """

    block_size: int
    groups: tuple[KvSpec, ...]
    order: KvOrder = "heads_first"

    @property
    def block_bytes(self) -> int:
        """The size of one arena block: the size of the largest group's block, because all groups share one arena of
        equal blocks.
        """
        return max(g.block_bytes(self.block_size) for g in self.groups)

    def rules(self, prefill_step: int = 0) -> KvRules:
        """Returns the retention rules of the groups, for counting blocks."""
        return KvRules(self.block_size, tuple(group.retention for group in self.groups), prefill_step)

    @property
    def slides(self) -> bool:
        """Whether a sequence stops needing its early blocks in some group."""
        return any(group.retention.slides for group in self.groups)

    @property
    def kv_dtype(self) -> DType | None:
        """The type of the keys and values, or None if blocks contain only recurrent states."""
        return next((g.dtype for g in self.groups if g.kind is not KvKind.STATE), None)

    @property
    def summary(self) -> str:
        """A text with the size of a block in tokens, the type of its KV, and its size in bytes."""
        return f"{self.block_size} tokens, {self.kv_dtype or 'states only'}, {self.block_bytes:,} bytes a block"

    @property
    def has_states(self) -> bool:
        """Whether a group has recurrent states. A step changes states in place, so the step cannot be repeated."""
        return any(g.kind is KvKind.STATE for g in self.groups)

    @property
    def fingerprint(self) -> bytes:
        """The SHA-256 of the layout. Processes share an arena only if their fingerprints are equal."""
        text = json.dumps(asdict(self), sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).digest()


class FinishReason(str, Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A grammar that the whole output of a sample must match, up to the end-of-sequence token."""

    kind: GrammarKind
    source: str = ""
    """The JSON schema (as JSON text), the regular expression, or the grammar in llguidance's variant of Lark."""
    options: tuple[str, ...] = ()
    """The possible outputs, for `choice`."""

    @property
    def digest(self) -> bytes:
        """The SHA-256 of the grammar, under which its compiled form is cached."""
        return hashlib.sha256(json.dumps((self.kind, self.source, self.options)).encode()).digest()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The parameters of a request that determine how its tokens are drawn. The gateway has already applied defaults."""

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Number of most likely tokens to keep; 0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    """A signed integer of 64 bits. The gateway chooses a random seed if the client gave none."""
    logprobs: int | None = None
    """Number of most likely tokens whose log-probabilities are returned beside the chosen token's, or None to return no
    log-probabilities.
    """
    prompt_logprobs: int | None = None
    num_sequences: int = 1
    """Number of samples (n); in a beam search, the number of best beams to return."""
    beam_width: int | None = None
    """Number of beams of a beam search, or None for samples."""
    length_penalty: float = 1.0
    """A beam's score is the sum of its log-probabilities / length ** length_penalty."""
    early_stopping: EarlyStopping = False
    """The condition that ends a beam search, as in transformers."""
    structured: StructuredOutput | None = None
    """The grammar that the output must match, or None for free text."""
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the output may not contain. No sequence is empty."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only tokens that may be drawn (at least one), or None for all tokens."""

    @property
    def named_ids(self) -> Iterator[int]:
        """All token ids that the parameters name."""
        yield from (token for token, _ in self.logit_bias)
        yield from (token for ids in self.bad_token_ids for token in ids)
        yield from self.allowed_token_ids or ()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def width(self) -> int:
        """The number of samples, or of beams in a beam search, that run at once for the request."""
        return self.num_sequences if self.beam_width is None else self.beam_width

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


@dataclass(frozen=True, slots=True)
class StoppingParams:
    """The conditions that end a sequence. The gateway handles stop strings; workers see only token ids."""

    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the sequence. They include the model's end-of-sequence ids unless `ignore_eos` is set.
    """

    def finish_reason(self, token_id: int, num_outputs: int) -> FinishReason | None:
        """Returns the reason why the newest of `num_outputs` tokens ends the sequence, or None if it does not end the
        sequence.
        """
        if token_id in self.stop_token_ids and num_outputs >= self.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_outputs >= self.max_tokens else None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probabilities of one token of a sequence and of the most likely tokens at its position."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most likely token."""
    top: tuple[tuple[int, float], ...] = ()
    """Pairs of token id and log-probability, most likely first."""


@dataclass(frozen=True, slots=True)
class Branch:
    """One sample of a sequence group, with its output so far."""

    sample_index: int = 0
    output_ids: tuple[int, ...] = ()
    cumulative_logprob: float = 0.0


@dataclass(frozen=True, slots=True)
class PromptSources:
    """The numbers of a prompt's tokens by the source of their KV."""

    cached: int = 0
    computed: int = 0
    transferred: int = 0
    """Number of token positions that were copied to the host of the decode worker. Positions that were cached there are
    not copied.
    """


@dataclass(frozen=True, slots=True)
class Timings:
    """The wall time of each phase of one request, in nanoseconds."""

    queue_ns: int = 0
    prefill_ns: int = 0
    hand_over_ns: int = 0
    decode_ns: int = 0


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Counts of the drafts that a decode worker has verified since it started (docs/speculation.md)."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted_by_position: tuple[int, ...] = ()
    """Number of accepted tokens by their place in the draft."""


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A report of a worker's queues. Gateways receive it in messages about their requests, and through the worker's
    entry in the registry.
    """

    num_running: int = 0
    num_waiting: int = 0
    waiting_tokens: int = 0
    free_blocks: int = 0
    """Blocks of the arena that are free or evictable."""
    total_blocks: int = 0
    """Blocks of the arena."""
    num_preempted: int = 0
    """Sequences that are swapped out of the arena and wait to be resumed."""
    prompt_tokens_per_s: float = 0.0
    """The estimated rate at which a prefill worker computes prompt tokens. 0.0 means that the rate is not known, or
    that the worker is a decode worker.
    """
    drafts: DraftCounts | None = None
    """The drafts of a decode worker, or None if it does not speculate."""
    step_fixed_s: float = 0.0
    """The part of a decode worker's recent steps, in seconds, that does not depend on the number of tokens."""
    step_token_s: float = 0.0
    """Time in seconds that each token adds to a step. Both are 0.0 for a prefill worker, and before the first step."""


@dataclass(frozen=True, slots=True)
class CacheQuota:
    """A limit on the number of a tenant's blocks that stay in the cache while no request uses them."""

    owner: bytes
    """32 bytes that name the tenant without revealing it."""
    percent: int
    """Percentage of an arena's blocks, 0 to 100."""


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """The record that a worker publishes so that gateways can find the worker."""

    worker_id: str
    role: Role
    address: str
    """host:port of the worker's gRPC server."""
    model: str
    arena_id: str
    block_size: int
    pairing: str
    """Hex fingerprint of model, layout and numerics. Workers exchange tickets only if their fingerprints are equal."""
    hash_domain: str
    """Hex of the hash domain from which, with the adapter and the salt, a prompt's chain of prefix hashes starts."""
    max_model_len: int
    max_num_seqs: int
    max_group_blocks: int = 0
    """The most blocks that a sequence group may need at this worker (`common.group_need.GroupNeed`): the worker's
    floor, or 0 if it is unknown.
    """
    epoch: int = 0
    draining: bool = False
    load: WorkerLoad = field(default_factory=WorkerLoad)
    adapters: Mapping[str, str] = field(default_factory=dict, compare=False)
    """The LoRA adapters that the worker has tried to load, by digest in hex. The value is "" if the adapter is loaded,
    or the reason why it cannot be loaded.
    """
    fallbacks: Mapping[str, int] = field(default_factory=dict, compare=False)
    """The fallback counts of the worker's process, which may have other roles (`common.telemetry.fallback_counts`)."""
    kv_windows: tuple[int | None, ...] = (None,)
    """The window of each KV group (`Retention.window`)."""
    prefill_step: int = 0
    """The most tokens of a prompt that are computed in one step."""

    @property
    def kv_rules(self) -> KvRules:
        """The retention rules of the KV groups, for counting blocks."""
        return KvRules(self.block_size, tuple(map(Retention, self.kv_windows)), self.prefill_step)

    def has_adapter(self, digest: str) -> bool:
        """Returns whether the worker has loaded the adapter with this digest. Returns True for "", which means the base
        model.
        """
        return not digest or self.adapters.get(digest) == ""
