from protos.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "cache_salt", "public_tokens", "cache_quota", "prompt_token_ids", "branches", "sampling", "stopping", "priority", "pooling", "adapter", "early_tickets")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHE_QUOTA_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    EARLY_TICKETS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    cache_salt: bytes
    public_tokens: int
    cache_quota: _types_pb2.CacheQuota
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    branches: _containers.RepeatedCompositeFieldContainer[_types_pb2.Branch]
    sampling: _types_pb2.SamplingParams
    stopping: _types_pb2.StoppingParams
    priority: int
    pooling: _types_pb2.Pooling
    adapter: bytes
    early_tickets: EarlyTickets
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., cache_salt: _Optional[bytes] = ..., public_tokens: _Optional[int] = ..., cache_quota: _Optional[_Union[_types_pb2.CacheQuota, _Mapping]] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., branches: _Optional[_Iterable[_Union[_types_pb2.Branch, _Mapping]]] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., stopping: _Optional[_Union[_types_pb2.StoppingParams, _Mapping]] = ..., priority: _Optional[int] = ..., pooling: _Optional[_Union[_types_pb2.Pooling, str]] = ..., adapter: _Optional[bytes] = ..., early_tickets: _Optional[_Union[EarlyTickets, _Mapping]] = ...) -> None: ...

class EarlyTickets(_message.Message):
    __slots__ = ("first_token", "min_tokens")
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    first_token: int
    min_tokens: int
    def __init__(self, first_token: _Optional[int] = ..., min_tokens: _Optional[int] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("queued", "progress", "done")
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    queued: PrefillQueued
    progress: PrefillProgress
    done: PrefillDone
    def __init__(self, queued: _Optional[_Union[PrefillQueued, _Mapping]] = ..., progress: _Optional[_Union[PrefillProgress, _Mapping]] = ..., done: _Optional[_Union[PrefillDone, _Mapping]] = ...) -> None: ...

class PrefillQueued(_message.Message):
    __slots__ = ("load",)
    LOAD_FIELD_NUMBER: _ClassVar[int]
    load: _types_pb2.WorkerLoad
    def __init__(self, load: _Optional[_Union[_types_pb2.WorkerLoad, _Mapping]] = ...) -> None: ...

class PrefillProgress(_message.Message):
    __slots__ = ("num_computed_tokens", "early_ticket")
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EARLY_TICKET_FIELD_NUMBER: _ClassVar[int]
    num_computed_tokens: int
    early_ticket: _types_pb2.Ticket
    def __init__(self, num_computed_tokens: _Optional[int] = ..., early_ticket: _Optional[_Union[_types_pb2.Ticket, _Mapping]] = ...) -> None: ...

class BranchToken(_message.Message):
    __slots__ = ("sample_index", "token_id", "logprob", "finish_reason")
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    sample_index: int
    token_id: int
    logprob: _types_pb2.TokenLogprob
    finish_reason: _types_pb2.FinishReason
    def __init__(self, sample_index: _Optional[int] = ..., token_id: _Optional[int] = ..., logprob: _Optional[_Union[_types_pb2.TokenLogprob, _Mapping]] = ..., finish_reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ...) -> None: ...

class PrefillDone(_message.Message):
    __slots__ = ("ticket", "tokens", "sources", "timings", "prompt_logprobs", "load", "beam_candidates", "embedding")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    BEAM_CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    ticket: _types_pb2.Ticket
    tokens: _containers.RepeatedCompositeFieldContainer[BranchToken]
    sources: _types_pb2.PromptSources
    timings: _types_pb2.Timings
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenLogprob]
    load: _types_pb2.WorkerLoad
    beam_candidates: _types_pb2.BeamCandidates
    embedding: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, ticket: _Optional[_Union[_types_pb2.Ticket, _Mapping]] = ..., tokens: _Optional[_Iterable[_Union[BranchToken, _Mapping]]] = ..., sources: _Optional[_Union[_types_pb2.PromptSources, _Mapping]] = ..., timings: _Optional[_Union[_types_pb2.Timings, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_types_pb2.TokenLogprob, _Mapping]]] = ..., load: _Optional[_Union[_types_pb2.WorkerLoad, _Mapping]] = ..., beam_candidates: _Optional[_Union[_types_pb2.BeamCandidates, _Mapping]] = ..., embedding: _Optional[_Iterable[float]] = ...) -> None: ...
