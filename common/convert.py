"""Converts between protobuf messages and the types of `common` (long: many small functions). The functions do not check
the parameters of requests, which the gateway validates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from common.errors import InvalidArgument
from common.ticket import Ticket, TicketId
from common.types import (
    BlockRef,
    Branch,
    CacheQuota,
    DraftCounts,
    DType,
    EarlyStopping,
    Epoch,
    FinishReason,
    GrammarKind,
    KvKind,
    KvLayout,
    KvOrder,
    KvSpec,
    Pooling,
    PromptSources,
    SamplingParams,
    StoppingParams,
    StructuredOutput,
    Timings,
    TokenLogprob,
    WorkerLoad,
)
from protos.v1 import types_pb2 as pb

_FINISH_TO_PB = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}
_FINISH_FROM_PB = {value: key for key, value in _FINISH_TO_PB.items()}
_STOPPING_TO_PB: dict[EarlyStopping, pb.BeamStopping] = {
    True: pb.BEAM_STOPPING_EARLY,
    False: pb.BEAM_STOPPING_HEURISTIC,
    "never": pb.BEAM_STOPPING_NEVER,
}
_STOPPING_FROM_PB = {value: key for key, value in _STOPPING_TO_PB.items()} | {pb.BEAM_STOPPING_UNSPECIFIED: False}


def finish_reason_to_pb(reason: FinishReason | None) -> pb.FinishReason:
    return _FINISH_TO_PB[reason]


def finish_reason_from_pb(reason: int) -> FinishReason | None:
    return _FINISH_FROM_PB[cast(pb.FinishReason, reason)]


def early_stopping_to_pb(rule: EarlyStopping) -> pb.BeamStopping:
    """Converts `early_stopping` to its enum value. Raises KeyError if `rule` is not an `EarlyStopping`."""
    return _STOPPING_TO_PB[rule]


def early_stopping_from_pb(rule: int) -> EarlyStopping:
    """Converts an enum value to `early_stopping`. UNSPECIFIED becomes False. Raises KeyError for an unknown value."""
    return _STOPPING_FROM_PB[cast(pb.BeamStopping, rule)]


def table_to_pb(table: Iterable[BlockRef]) -> pb.BlockTable:
    refs = tuple(table)
    return pb.BlockTable(blocks=[r.block for r in refs], generations=[r.generation for r in refs])


def table_from_pb(message: pb.BlockTable) -> tuple[BlockRef, ...]:
    """Converts a block table. Raises InvalidArgument if the numbers of blocks and generations differ."""
    if (num_blocks := len(message.blocks)) != (got := len(message.generations)):
        raise InvalidArgument.of("generations", f"must have one entry for each of the {num_blocks} blocks, got {got}")
    return tuple(map(BlockRef._make, zip(message.blocks, message.generations, strict=True)))


def ticket_to_pb(ticket: Ticket) -> pb.Ticket:
    """Converts a ticket. If a branch begins with the same blocks as the first branch in every KV group, these blocks
    are sent only once.
    """
    branches = []
    for index, (groups, num_tokens) in enumerate(zip(ticket.tables, ticket.num_tokens, strict=True)):
        shared = min(map(_shared, ticket.tables[0], groups), default=0) if index else 0
        tables = [table_to_pb(group[shared:]) for group in groups]
        branches.append(pb.BranchTables(groups=tables, shared_blocks=shared, num_tokens=num_tokens))
    return pb.Ticket(arena_id=ticket.arena_id, epoch=ticket.id.epoch, secret=ticket.id.secret, branches=branches)


def _shared(first: Sequence[BlockRef], other: Sequence[BlockRef]) -> int:
    """Returns the number of blocks that two tables have in common at their beginning."""
    pairs = zip(first, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(other)))


def ticket_from_pb(message: pb.Ticket) -> Ticket:
    """Converts a ticket. Raises ValueError if a branch does not have as many KV groups as the first branch, or shares
    more blocks than the first branch has. Raises InvalidArgument if a block table is invalid.
    """
    tables: list[tuple[tuple[BlockRef, ...], ...]] = []
    for branch in message.branches:
        own = [table_from_pb(group) for group in branch.groups]
        heads = [first[: branch.shared_blocks] for first in tables[0]] if tables else [() for _ in own]
        if len(heads) != len(own):
            raise ValueError(f"a ticket's branch has {len(own)} KV groups, but its first branch has {len(heads)}")
        if any(len(head) != branch.shared_blocks for head in heads):
            raise ValueError("a ticket's branch shares more blocks than its first branch has")
        tables.append(tuple(head + rest for head, rest in zip(heads, own, strict=True)))
    num_tokens = tuple(branch.num_tokens for branch in message.branches)
    return Ticket(message.arena_id, TicketId(Epoch(message.epoch), message.secret), tuple(tables), num_tokens)


def branch_to_pb(branch: Branch) -> pb.Branch:
    return pb.Branch(
        sample_index=branch.sample_index,
        output_token_ids=branch.output_ids,
        cumulative_logprob=branch.cumulative_logprob,
    )


def branch_from_pb(message: pb.Branch) -> Branch:
    return Branch(message.sample_index, tuple(message.output_token_ids), message.cumulative_logprob)


def quota_to_pb(quota: CacheQuota) -> pb.CacheQuota:
    return pb.CacheQuota(owner=quota.owner, percent=quota.percent)


def quota_from_pb(message: pb.CacheQuota) -> CacheQuota:
    """Converts a quota. Raises ValueError if the owner does not have 32 bytes or the percentage is above 100."""
    if len(message.owner) != 32 or message.percent > 100:
        raise ValueError("must have an owner of 32 bytes and a percent of at most 100")
    return CacheQuota(message.owner, message.percent)


POOLINGS: Mapping[Pooling, pb.Pooling] = {"last": pb.POOLING_LAST, "mean": pb.POOLING_MEAN}


def sampling_to_pb(params: SamplingParams) -> pb.SamplingParams:
    message = pb.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=dict(params.logit_bias),
        seed=params.seed,
        num_sequences=params.num_sequences,
        beam_width=params.beam_width,
        length_penalty=params.length_penalty,
        early_stopping=early_stopping_to_pb(params.early_stopping),
    )
    if params.logprobs is not None:
        message.logprobs = params.logprobs
    if params.prompt_logprobs is not None:
        message.prompt_logprobs = params.prompt_logprobs
    if params.structured is not None:
        message.structured_output.CopyFrom(structured_to_pb(params.structured))
    message.bad_token_ids.extend(pb.TokenSequence(ids=ids) for ids in params.bad_token_ids)
    if params.allowed_token_ids is not None:
        message.allowed_token_ids.CopyFrom(pb.TokenSequence(ids=params.allowed_token_ids))
    return message


def sampling_from_pb(message: pb.SamplingParams) -> SamplingParams:
    """Converts sampling parameters. Absent fields take the defaults of `SamplingParams`."""
    plain = (
        "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
        "logprobs", "prompt_logprobs", "num_sequences", "beam_width", "length_penalty",
    )  # fmt: skip
    given = {name: getattr(message, name) for name in plain if message.HasField(name)}
    return SamplingParams(
        **given,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        early_stopping=_STOPPING_FROM_PB.get(message.early_stopping, False),
        structured=structured_from_pb(message.structured_output) if message.HasField("structured_output") else None,
        bad_token_ids=tuple(tuple(sequence.ids) for sequence in message.bad_token_ids),
        allowed_token_ids=tuple(message.allowed_token_ids.ids) if message.HasField("allowed_token_ids") else None,
    )


def structured_to_pb(wanted: StructuredOutput) -> pb.StructuredOutput:
    if wanted.kind == "choice":
        return pb.StructuredOutput(choice=pb.Choice(options=wanted.options))
    if wanted.kind == "json_object":
        return pb.StructuredOutput(json_object=pb.JsonObject())
    message = pb.StructuredOutput()
    setattr(message, wanted.kind, wanted.source)
    return message


def structured_from_pb(message: pb.StructuredOutput) -> StructuredOutput:
    """Converts the message of a structured output. A message without a grammar becomes a choice without options, which
    matches nothing.
    """
    kind: GrammarKind = message.WhichOneof("grammar") or "choice"
    source = "" if kind in ("choice", "json_object") else getattr(message, kind)
    return StructuredOutput(kind, source, tuple(message.choice.options))


def stopping_to_pb(params: StoppingParams) -> pb.StoppingParams:
    return pb.StoppingParams(
        max_tokens=params.max_tokens, min_tokens=params.min_tokens, stop_token_ids=params.stop_token_ids
    )


def stopping_from_pb(message: pb.StoppingParams) -> StoppingParams:
    return StoppingParams(message.max_tokens, message.min_tokens, tuple(message.stop_token_ids))


def logprob_to_pb(item: TokenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        token_id=item.token_id,
        logprob=item.logprob,
        rank=item.rank,
        top_token_ids=[t for t, _ in item.top],
        top_logprobs=[p for _, p in item.top],
    )


def logprob_from_pb(message: pb.TokenLogprob) -> TokenLogprob:
    top = tuple(zip(message.top_token_ids, message.top_logprobs, strict=True))
    return TokenLogprob(message.token_id, message.logprob, message.rank, top)


def sources_to_pb(sources: PromptSources) -> pb.PromptSources:
    return pb.PromptSources(
        cached_tokens=sources.cached, computed_tokens=sources.computed, transferred_tokens=sources.transferred
    )


def sources_from_pb(message: pb.PromptSources) -> PromptSources:
    return PromptSources(message.cached_tokens, message.computed_tokens, message.transferred_tokens)


def timings_to_pb(timings: Timings) -> pb.Timings:
    return pb.Timings(
        queue_ns=timings.queue_ns,
        prefill_ns=timings.prefill_ns,
        hand_over_ns=timings.hand_over_ns,
        decode_ns=timings.decode_ns,
    )


def timings_from_pb(message: pb.Timings) -> Timings:
    return Timings(message.queue_ns, message.prefill_ns, message.hand_over_ns, message.decode_ns)


def load_to_pb(load: WorkerLoad) -> pb.WorkerLoad:
    return pb.WorkerLoad(
        num_running=load.num_running, num_waiting=load.num_waiting, waiting_tokens=load.waiting_tokens,
        free_blocks=load.free_blocks, total_blocks=load.total_blocks, num_preempted=load.num_preempted,
        prompt_tokens_per_s=load.prompt_tokens_per_s,
        drafts=None if load.drafts is None else _drafts_to_pb(load.drafts),
        step_fixed_s=load.step_fixed_s, step_token_s=load.step_token_s,
    )  # fmt: skip


def load_from_pb(message: pb.WorkerLoad) -> WorkerLoad:
    return WorkerLoad(
        message.num_running, message.num_waiting, message.waiting_tokens, message.free_blocks, message.total_blocks,
        message.num_preempted, message.prompt_tokens_per_s,
        _drafts_from_pb(message.drafts) if message.HasField("drafts") else None,
        message.step_fixed_s, message.step_token_s,
    )  # fmt: skip


def _drafts_to_pb(counts: DraftCounts) -> pb.DraftCounts:
    num, accepted = (counts.num_drafts, counts.num_draft_tokens), counts.accepted_by_position
    return pb.DraftCounts(num_drafts=num[0], num_draft_tokens=num[1], accepted_by_position=accepted)


def _drafts_from_pb(message: pb.DraftCounts) -> DraftCounts:
    return DraftCounts(message.num_drafts, message.num_draft_tokens, tuple(message.accepted_by_position))


def layout_to_pb(layout: KvLayout) -> pb.KvLayout:
    groups = [
        pb.KvSpec(
            num_layers=g.num_layers,
            num_kv_heads=g.num_kv_heads,
            head_dim=g.head_dim,
            dtype=g.dtype,
            kind=g.kind.value,
            window=g.window,
            state_bytes=g.state_bytes,
        )
        for g in layout.groups
    ]
    return pb.KvLayout(block_size=layout.block_size, groups=groups, order=layout.order)


def layout_from_pb(message: pb.KvLayout) -> KvLayout:
    groups = tuple(
        KvSpec(
            g.num_layers,
            g.num_kv_heads,
            g.head_dim,
            cast(DType, g.dtype),
            KvKind(g.kind),
            g.window if g.HasField("window") else None,
            g.state_bytes,
        )
        for g in message.groups
    )
    return KvLayout(message.block_size, groups, cast(KvOrder, message.order))
