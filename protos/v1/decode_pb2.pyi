from protos.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Rejection(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REJECTION_UNSPECIFIED: _ClassVar[Rejection]
    REJECTION_GIVEN_BACK: _ClassVar[Rejection]
    REJECTION_LOST: _ClassVar[Rejection]
    REJECTION_QUEUE_FULL: _ClassVar[Rejection]
    REJECTION_DEADLINE: _ClassVar[Rejection]
    REJECTION_TOO_LARGE: _ClassVar[Rejection]
    REJECTION_DRAINING: _ClassVar[Rejection]
    REJECTION_INTERNAL: _ClassVar[Rejection]
    REJECTION_GRAMMAR: _ClassVar[Rejection]
    REJECTION_ADAPTER: _ClassVar[Rejection]
REJECTION_UNSPECIFIED: Rejection
REJECTION_GIVEN_BACK: Rejection
REJECTION_LOST: Rejection
REJECTION_QUEUE_FULL: Rejection
REJECTION_DEADLINE: Rejection
REJECTION_TOO_LARGE: Rejection
REJECTION_DRAINING: Rejection
REJECTION_INTERNAL: Rejection
REJECTION_GRAMMAR: Rejection
REJECTION_ADAPTER: Rejection

class SessionRequest(_message.Message):
    __slots__ = ("submit", "cancel")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    cancel: Cancel
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("handle", "request_id", "attempt", "ticket", "cache_salt", "public_tokens", "cache_quota", "prompt_token_ids", "branches", "sampling", "stopping", "priority", "timeout_ms", "beam_candidates", "adapter", "traceparent", "tracestate")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHE_QUOTA_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    BEAM_CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    request_id: str
    attempt: int
    ticket: _types_pb2.Ticket
    cache_salt: bytes
    public_tokens: int
    cache_quota: _types_pb2.CacheQuota
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    branches: _containers.RepeatedCompositeFieldContainer[_types_pb2.Branch]
    sampling: _types_pb2.SamplingParams
    stopping: _types_pb2.StoppingParams
    priority: int
    timeout_ms: int
    beam_candidates: _types_pb2.BeamCandidates
    adapter: bytes
    traceparent: str
    tracestate: str
    def __init__(self, handle: _Optional[int] = ..., request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., ticket: _Optional[_Union[_types_pb2.Ticket, _Mapping]] = ..., cache_salt: _Optional[bytes] = ..., public_tokens: _Optional[int] = ..., cache_quota: _Optional[_Union[_types_pb2.CacheQuota, _Mapping]] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., branches: _Optional[_Iterable[_Union[_types_pb2.Branch, _Mapping]]] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., stopping: _Optional[_Union[_types_pb2.StoppingParams, _Mapping]] = ..., priority: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., beam_candidates: _Optional[_Union[_types_pb2.BeamCandidates, _Mapping]] = ..., adapter: _Optional[bytes] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("handle", "sample_index")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    handle: int
    sample_index: int
    def __init__(self, handle: _Optional[int] = ..., sample_index: _Optional[int] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("outputs", "load", "plain_tokens")
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PLAIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[SequenceOutput]
    load: _types_pb2.WorkerLoad
    plain_tokens: PlainTokens
    def __init__(self, outputs: _Optional[_Iterable[_Union[SequenceOutput, _Mapping]]] = ..., load: _Optional[_Union[_types_pb2.WorkerLoad, _Mapping]] = ..., plain_tokens: _Optional[_Union[PlainTokens, _Mapping]] = ...) -> None: ...

class PlainTokens(_message.Message):
    __slots__ = ("handles", "attempts", "sample_indices", "output_indices", "token_ids")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDICES_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_INDICES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedScalarFieldContainer[int]
    attempts: _containers.RepeatedScalarFieldContainer[int]
    sample_indices: _containers.RepeatedScalarFieldContainer[int]
    output_indices: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, handles: _Optional[_Iterable[int]] = ..., attempts: _Optional[_Iterable[int]] = ..., sample_indices: _Optional[_Iterable[int]] = ..., output_indices: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SequenceOutput(_message.Message):
    __slots__ = ("handle", "attempt", "sample_index", "first_index", "token_ids", "logprobs", "finish_reason", "rejection", "timings", "beam_score", "account")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    REJECTION_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    BEAM_SCORE_FIELD_NUMBER: _ClassVar[int]
    ACCOUNT_FIELD_NUMBER: _ClassVar[int]
    handle: int
    attempt: int
    sample_index: int
    first_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenLogprob]
    finish_reason: _types_pb2.FinishReason
    rejection: Rejection
    timings: _types_pb2.Timings
    beam_score: float
    account: GroupAccount
    def __init__(self, handle: _Optional[int] = ..., attempt: _Optional[int] = ..., sample_index: _Optional[int] = ..., first_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_types_pb2.TokenLogprob, _Mapping]]] = ..., finish_reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., rejection: _Optional[_Union[Rejection, str]] = ..., timings: _Optional[_Union[_types_pb2.Timings, _Mapping]] = ..., beam_score: _Optional[float] = ..., account: _Optional[_Union[GroupAccount, _Mapping]] = ...) -> None: ...

class GroupAccount(_message.Message):
    __slots__ = ("waiting_ns", "copied_blocks", "swaps", "claim_ns")
    WAITING_NS_FIELD_NUMBER: _ClassVar[int]
    COPIED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SWAPS_FIELD_NUMBER: _ClassVar[int]
    CLAIM_NS_FIELD_NUMBER: _ClassVar[int]
    waiting_ns: int
    copied_blocks: int
    swaps: _containers.RepeatedCompositeFieldContainer[Swap]
    claim_ns: int
    def __init__(self, waiting_ns: _Optional[int] = ..., copied_blocks: _Optional[int] = ..., swaps: _Optional[_Iterable[_Union[Swap, _Mapping]]] = ..., claim_ns: _Optional[int] = ...) -> None: ...

class Swap(_message.Message):
    __slots__ = ("start_ns", "duration_ns", "blocks_out", "blocks_in")
    START_NS_FIELD_NUMBER: _ClassVar[int]
    DURATION_NS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_OUT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_IN_FIELD_NUMBER: _ClassVar[int]
    start_ns: int
    duration_ns: int
    blocks_out: int
    blocks_in: int
    def __init__(self, start_ns: _Optional[int] = ..., duration_ns: _Optional[int] = ..., blocks_out: _Optional[int] = ..., blocks_in: _Optional[int] = ...) -> None: ...
