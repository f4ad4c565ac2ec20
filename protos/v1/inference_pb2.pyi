from protos.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PhaseKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_KIND_UNSPECIFIED: _ClassVar[PhaseKind]
    PHASE_KIND_INTAKE: _ClassVar[PhaseKind]
    PHASE_KIND_GATE: _ClassVar[PhaseKind]
    PHASE_KIND_WORKER: _ClassVar[PhaseKind]
    PHASE_KIND_PREFILL_QUEUE: _ClassVar[PhaseKind]
    PHASE_KIND_PREFILL: _ClassVar[PhaseKind]
    PHASE_KIND_PULL: _ClassVar[PhaseKind]
    PHASE_KIND_HAND_OVER: _ClassVar[PhaseKind]
    PHASE_KIND_DECODE_QUEUE: _ClassVar[PhaseKind]
    PHASE_KIND_DECODE: _ClassVar[PhaseKind]
    PHASE_KIND_SWAPPED: _ClassVar[PhaseKind]
    PHASE_KIND_RETRY: _ClassVar[PhaseKind]
    PHASE_KIND_COME_BACK: _ClassVar[PhaseKind]
    PHASE_KIND_TRANSPORT: _ClassVar[PhaseKind]
    PHASE_KIND_DELIVERY: _ClassVar[PhaseKind]
PHASE_KIND_UNSPECIFIED: PhaseKind
PHASE_KIND_INTAKE: PhaseKind
PHASE_KIND_GATE: PhaseKind
PHASE_KIND_WORKER: PhaseKind
PHASE_KIND_PREFILL_QUEUE: PhaseKind
PHASE_KIND_PREFILL: PhaseKind
PHASE_KIND_PULL: PhaseKind
PHASE_KIND_HAND_OVER: PhaseKind
PHASE_KIND_DECODE_QUEUE: PhaseKind
PHASE_KIND_DECODE: PhaseKind
PHASE_KIND_SWAPPED: PhaseKind
PHASE_KIND_RETRY: PhaseKind
PHASE_KIND_COME_BACK: PhaseKind
PHASE_KIND_TRANSPORT: PhaseKind
PHASE_KIND_DELIVERY: PhaseKind

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class CacheOptions(_message.Message):
    __slots__ = ("cache_salt",)
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    cache_salt: str
    def __init__(self, cache_salt: _Optional[str] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "model", "text", "token_ids", "chat", "sampling", "stopping", "cache", "priority", "skip_special_tokens", "truncate_prompt_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    text: str
    token_ids: TokenIds
    chat: Chat
    sampling: _types_pb2.SamplingParams
    stopping: _types_pb2.StoppingParams
    cache: CacheOptions
    priority: int
    skip_special_tokens: bool
    truncate_prompt_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., stopping: _Optional[_Union[_types_pb2.StoppingParams, _Mapping]] = ..., cache: _Optional[_Union[CacheOptions, _Mapping]] = ..., priority: _Optional[int] = ..., skip_special_tokens: _Optional[bool] = ..., truncate_prompt_tokens: _Optional[int] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "sources", "handed_over_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    HANDED_OVER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    sources: _types_pb2.PromptSources
    handed_over_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., sources: _Optional[_Union[_types_pb2.PromptSources, _Mapping]] = ..., handed_over_tokens: _Optional[int] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "index", "text_delta", "token_ids", "logprobs", "prompt_logprobs", "finish_reason", "stop_token_id", "stop_string", "usage", "timings", "beam_score")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_DELTA_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    BEAM_SCORE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    index: int
    text_delta: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenLogprob]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenLogprob]
    finish_reason: _types_pb2.FinishReason
    stop_token_id: int
    stop_string: str
    usage: Usage
    timings: _types_pb2.Timings
    beam_score: float
    def __init__(self, request_id: _Optional[str] = ..., index: _Optional[int] = ..., text_delta: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_types_pb2.TokenLogprob, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_types_pb2.TokenLogprob, _Mapping]]] = ..., finish_reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., stop_string: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timings: _Optional[_Union[_types_pb2.Timings, _Mapping]] = ..., beam_score: _Optional[float] = ...) -> None: ...

class EmbedRequest(_message.Message):
    __slots__ = ("request_id", "model", "text", "token_ids", "dimensions", "cache", "priority", "truncate_prompt_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    text: str
    token_ids: TokenIds
    dimensions: int
    cache: CacheOptions
    priority: int
    truncate_prompt_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., dimensions: _Optional[int] = ..., cache: _Optional[_Union[CacheOptions, _Mapping]] = ..., priority: _Optional[int] = ..., truncate_prompt_tokens: _Optional[int] = ...) -> None: ...

class EmbedResponse(_message.Message):
    __slots__ = ("request_id", "embedding", "usage", "timings")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    embedding: _containers.RepeatedScalarFieldContainer[float]
    usage: Usage
    timings: _types_pb2.Timings
    def __init__(self, request_id: _Optional[str] = ..., embedding: _Optional[_Iterable[float]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timings: _Optional[_Union[_types_pb2.Timings, _Mapping]] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "text", "chat", "add_special_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    chat: Chat
    add_special_tokens: bool
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., add_special_tokens: _Optional[bool] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids", "max_model_len")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_model_len: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., max_model_len: _Optional[int] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("model", "token_ids")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    model: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, model: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Model(_message.Message):
    __slots__ = ("id", "max_model_len", "vocab_size", "eos_token_ids", "pooling", "parent")
    ID_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    id: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    pooling: str
    parent: str
    def __init__(self, id: _Optional[str] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., pooling: _Optional[str] = ..., parent: _Optional[str] = ...) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id", "limit")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    limit: int
    def __init__(self, request_id: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("explanations",)
    EXPLANATIONS_FIELD_NUMBER: _ClassVar[int]
    explanations: _containers.RepeatedCompositeFieldContainer[Explanation]
    def __init__(self, explanations: _Optional[_Iterable[_Union[Explanation, _Mapping]]] = ...) -> None: ...

class Explanation(_message.Message):
    __slots__ = ("request_id", "received_unix_ns", "outcome", "error", "num_sequences", "usage", "timings", "total_ns", "first_token_ns", "phases", "attempts")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_NS_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    received_unix_ns: int
    outcome: str
    error: str
    num_sequences: int
    usage: Usage
    timings: _types_pb2.Timings
    total_ns: int
    first_token_ns: int
    phases: _containers.RepeatedCompositeFieldContainer[Phase]
    attempts: _containers.RepeatedCompositeFieldContainer[AttemptExplanation]
    def __init__(self, request_id: _Optional[str] = ..., received_unix_ns: _Optional[int] = ..., outcome: _Optional[str] = ..., error: _Optional[str] = ..., num_sequences: _Optional[int] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timings: _Optional[_Union[_types_pb2.Timings, _Mapping]] = ..., total_ns: _Optional[int] = ..., first_token_ns: _Optional[int] = ..., phases: _Optional[_Iterable[_Union[Phase, _Mapping]]] = ..., attempts: _Optional[_Iterable[_Union[AttemptExplanation, _Mapping]]] = ...) -> None: ...

class Phase(_message.Message):
    __slots__ = ("kind", "duration_ns", "attempt")
    KIND_FIELD_NUMBER: _ClassVar[int]
    DURATION_NS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    kind: PhaseKind
    duration_ns: int
    attempt: int
    def __init__(self, kind: _Optional[_Union[PhaseKind, str]] = ..., duration_ns: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class ConsideredWorker(_message.Message):
    __slots__ = ("worker_id", "predicted_s", "missing_tokens", "delay_s", "itl_s")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_S_FIELD_NUMBER: _ClassVar[int]
    MISSING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DELAY_S_FIELD_NUMBER: _ClassVar[int]
    ITL_S_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    predicted_s: float
    missing_tokens: int
    delay_s: float
    itl_s: float
    def __init__(self, worker_id: _Optional[str] = ..., predicted_s: _Optional[float] = ..., missing_tokens: _Optional[int] = ..., delay_s: _Optional[float] = ..., itl_s: _Optional[float] = ...) -> None: ...

class AttemptExplanation(_message.Message):
    __slots__ = ("prefill_worker", "prefill_considered", "decode_worker", "decode_considered", "sources", "handed_over_tokens", "handed_over_blocks", "arena_id", "blocks", "output_tokens", "copied_blocks", "swapped_out_blocks", "swapped_in_blocks", "num_swaps", "end", "generations")
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CONSIDERED_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_CONSIDERED_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    HANDED_OVER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HANDED_OVER_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COPIED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_OUT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_IN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAPS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    prefill_worker: str
    prefill_considered: _containers.RepeatedCompositeFieldContainer[ConsideredWorker]
    decode_worker: str
    decode_considered: _containers.RepeatedCompositeFieldContainer[ConsideredWorker]
    sources: _types_pb2.PromptSources
    handed_over_tokens: int
    handed_over_blocks: int
    arena_id: str
    blocks: _containers.RepeatedScalarFieldContainer[int]
    output_tokens: int
    copied_blocks: int
    swapped_out_blocks: int
    swapped_in_blocks: int
    num_swaps: int
    end: str
    generations: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, prefill_worker: _Optional[str] = ..., prefill_considered: _Optional[_Iterable[_Union[ConsideredWorker, _Mapping]]] = ..., decode_worker: _Optional[str] = ..., decode_considered: _Optional[_Iterable[_Union[ConsideredWorker, _Mapping]]] = ..., sources: _Optional[_Union[_types_pb2.PromptSources, _Mapping]] = ..., handed_over_tokens: _Optional[int] = ..., handed_over_blocks: _Optional[int] = ..., arena_id: _Optional[str] = ..., blocks: _Optional[_Iterable[int]] = ..., output_tokens: _Optional[int] = ..., copied_blocks: _Optional[int] = ..., swapped_out_blocks: _Optional[int] = ..., swapped_in_blocks: _Optional[int] = ..., num_swaps: _Optional[int] = ..., end: _Optional[str] = ..., generations: _Optional[_Iterable[int]] = ...) -> None: ...
