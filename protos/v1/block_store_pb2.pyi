from protos.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ArenaMemory(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ARENA_MEMORY_UNSPECIFIED: _ClassVar[ArenaMemory]
    ARENA_MEMORY_HOST: _ClassVar[ArenaMemory]
    ARENA_MEMORY_STORE_DEVICE: _ClassVar[ArenaMemory]
    ARENA_MEMORY_WORKER_DEVICE: _ClassVar[ArenaMemory]

class BlockState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BLOCK_STATE_UNSPECIFIED: _ClassVar[BlockState]
    BLOCK_STATE_FREE: _ClassVar[BlockState]
    BLOCK_STATE_RESERVED: _ClassVar[BlockState]
    BLOCK_STATE_SEALED: _ClassVar[BlockState]
    BLOCK_STATE_CACHED: _ClassVar[BlockState]
    BLOCK_STATE_QUARANTINE: _ClassVar[BlockState]
ARENA_MEMORY_UNSPECIFIED: ArenaMemory
ARENA_MEMORY_HOST: ArenaMemory
ARENA_MEMORY_STORE_DEVICE: ArenaMemory
ARENA_MEMORY_WORKER_DEVICE: ArenaMemory
BLOCK_STATE_UNSPECIFIED: BlockState
BLOCK_STATE_FREE: BlockState
BLOCK_STATE_RESERVED: BlockState
BLOCK_STATE_SEALED: BlockState
BLOCK_STATE_CACHED: BlockState
BLOCK_STATE_QUARANTINE: BlockState

class AttachRequest(_message.Message):
    __slots__ = ("worker_id", "role", "layout", "weights_bytes", "peak_activation_bytes", "max_model_len", "floor_blocks", "device_uuid")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    PEAK_ACTIVATION_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    FLOOR_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: str
    layout: _types_pb2.KvLayout
    weights_bytes: int
    peak_activation_bytes: int
    max_model_len: int
    floor_blocks: int
    device_uuid: bytes
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[str] = ..., layout: _Optional[_Union[_types_pb2.KvLayout, _Mapping]] = ..., weights_bytes: _Optional[int] = ..., peak_activation_bytes: _Optional[int] = ..., max_model_len: _Optional[int] = ..., floor_blocks: _Optional[int] = ..., device_uuid: _Optional[bytes] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("arena_id", "directory", "num_blocks", "block_bytes", "redis_url", "floor_blocks", "has_disk_tier")
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    REDIS_URL_FIELD_NUMBER: _ClassVar[int]
    FLOOR_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HAS_DISK_TIER_FIELD_NUMBER: _ClassVar[int]
    arena_id: str
    directory: str
    num_blocks: int
    block_bytes: int
    redis_url: str
    floor_blocks: int
    has_disk_tier: bool
    def __init__(self, arena_id: _Optional[str] = ..., directory: _Optional[str] = ..., num_blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., redis_url: _Optional[str] = ..., floor_blocks: _Optional[int] = ..., has_disk_tier: _Optional[bool] = ...) -> None: ...

class InspectRequest(_message.Message):
    __slots__ = ("include_blocks", "include_states", "blocks")
    INCLUDE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STATES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    include_blocks: bool
    include_states: bool
    blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, include_blocks: _Optional[bool] = ..., include_states: _Optional[bool] = ..., blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class BlockInfo(_message.Message):
    __slots__ = ("block", "generation", "state", "prefix_hash", "holders")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    block: int
    generation: int
    state: BlockState
    prefix_hash: bytes
    holders: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, block: _Optional[int] = ..., generation: _Optional[int] = ..., state: _Optional[_Union[BlockState, str]] = ..., prefix_hash: _Optional[bytes] = ..., holders: _Optional[_Iterable[int]] = ...) -> None: ...

class HolderInfo(_message.Message):
    __slots__ = ("epoch", "name", "num_references", "lease_ms", "floor_blocks")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_REFERENCES_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    FLOOR_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    name: str
    num_references: int
    lease_ms: int
    floor_blocks: int
    def __init__(self, epoch: _Optional[int] = ..., name: _Optional[str] = ..., num_references: _Optional[int] = ..., lease_ms: _Optional[int] = ..., floor_blocks: _Optional[int] = ...) -> None: ...

class DiskTierInfo(_message.Message):
    __slots__ = ("num_blocks", "capacity_blocks", "num_stored", "num_restored")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_STORED_FIELD_NUMBER: _ClassVar[int]
    NUM_RESTORED_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    capacity_blocks: int
    num_stored: int
    num_restored: int
    def __init__(self, num_blocks: _Optional[int] = ..., capacity_blocks: _Optional[int] = ..., num_stored: _Optional[int] = ..., num_restored: _Optional[int] = ...) -> None: ...

class InspectResponse(_message.Message):
    __slots__ = ("arena_id", "num_blocks", "free", "reserved", "sealed", "cached", "quarantine", "holders", "blocks", "block_size", "block_bytes", "memory", "device_uuid", "kv_dtype", "disk_tier", "states")
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    QUARANTINE_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    DISK_TIER_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    arena_id: str
    num_blocks: int
    free: int
    reserved: int
    sealed: int
    cached: int
    quarantine: int
    holders: _containers.RepeatedCompositeFieldContainer[HolderInfo]
    blocks: _containers.RepeatedCompositeFieldContainer[BlockInfo]
    block_size: int
    block_bytes: int
    memory: ArenaMemory
    device_uuid: bytes
    kv_dtype: str
    disk_tier: DiskTierInfo
    states: bytes
    def __init__(self, arena_id: _Optional[str] = ..., num_blocks: _Optional[int] = ..., free: _Optional[int] = ..., reserved: _Optional[int] = ..., sealed: _Optional[int] = ..., cached: _Optional[int] = ..., quarantine: _Optional[int] = ..., holders: _Optional[_Iterable[_Union[HolderInfo, _Mapping]]] = ..., blocks: _Optional[_Iterable[_Union[BlockInfo, _Mapping]]] = ..., block_size: _Optional[int] = ..., block_bytes: _Optional[int] = ..., memory: _Optional[_Union[ArenaMemory, str]] = ..., device_uuid: _Optional[bytes] = ..., kv_dtype: _Optional[str] = ..., disk_tier: _Optional[_Union[DiskTierInfo, _Mapping]] = ..., states: _Optional[bytes] = ...) -> None: ...

class ReadBlocksRequest(_message.Message):
    __slots__ = ("arena_id", "table", "ticket_epoch", "ticket_secret")
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    TICKET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TICKET_SECRET_FIELD_NUMBER: _ClassVar[int]
    arena_id: str
    table: _types_pb2.BlockTable
    ticket_epoch: int
    ticket_secret: bytes
    def __init__(self, arena_id: _Optional[str] = ..., table: _Optional[_Union[_types_pb2.BlockTable, _Mapping]] = ..., ticket_epoch: _Optional[int] = ..., ticket_secret: _Optional[bytes] = ...) -> None: ...

class ReadBlocksResponse(_message.Message):
    __slots__ = ("index", "data", "digests")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    index: int
    data: bytes
    digests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, index: _Optional[int] = ..., data: _Optional[bytes] = ..., digests: _Optional[_Iterable[int]] = ...) -> None: ...

class KeepTicketRequest(_message.Message):
    __slots__ = ("arena_id", "ticket_epoch", "ticket_secret", "table")
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TICKET_SECRET_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    arena_id: str
    ticket_epoch: int
    ticket_secret: bytes
    table: _types_pb2.BlockTable
    def __init__(self, arena_id: _Optional[str] = ..., ticket_epoch: _Optional[int] = ..., ticket_secret: _Optional[bytes] = ..., table: _Optional[_Union[_types_pb2.BlockTable, _Mapping]] = ...) -> None: ...

class KeepTicketResponse(_message.Message):
    __slots__ = ("prefix_hashes", "lease_ms", "byte_port")
    PREFIX_HASHES_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    BYTE_PORT_FIELD_NUMBER: _ClassVar[int]
    prefix_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    lease_ms: int
    byte_port: int
    def __init__(self, prefix_hashes: _Optional[_Iterable[bytes]] = ..., lease_ms: _Optional[int] = ..., byte_port: _Optional[int] = ...) -> None: ...

class LocateBlocksRequest(_message.Message):
    __slots__ = ("arena_id", "table", "ticket_epoch", "ticket_secret")
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    TICKET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TICKET_SECRET_FIELD_NUMBER: _ClassVar[int]
    arena_id: str
    table: _types_pb2.BlockTable
    ticket_epoch: int
    ticket_secret: bytes
    def __init__(self, arena_id: _Optional[str] = ..., table: _Optional[_Union[_types_pb2.BlockTable, _Mapping]] = ..., ticket_epoch: _Optional[int] = ..., ticket_secret: _Optional[bytes] = ...) -> None: ...

class LocateBlocksResponse(_message.Message):
    __slots__ = ("agent", "address", "block_bytes", "digests")
    AGENT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    agent: bytes
    address: int
    block_bytes: int
    digests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, agent: _Optional[bytes] = ..., address: _Optional[int] = ..., block_bytes: _Optional[int] = ..., digests: _Optional[_Iterable[int]] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("ticket", "source", "cache_quota", "public_tokens")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    CACHE_QUOTA_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ticket: _types_pb2.Ticket
    source: str
    cache_quota: _types_pb2.CacheQuota
    public_tokens: int
    def __init__(self, ticket: _Optional[_Union[_types_pb2.Ticket, _Mapping]] = ..., source: _Optional[str] = ..., cache_quota: _Optional[_Union[_types_pb2.CacheQuota, _Mapping]] = ..., public_tokens: _Optional[int] = ...) -> None: ...

class PullResponse(_message.Message):
    __slots__ = ("ticket", "num_pulled", "num_found", "num_bytes", "num_tokens", "num_early_tokens")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    NUM_PULLED_FIELD_NUMBER: _ClassVar[int]
    NUM_FOUND_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_EARLY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ticket: _types_pb2.Ticket
    num_pulled: int
    num_found: int
    num_bytes: int
    num_tokens: int
    num_early_tokens: int
    def __init__(self, ticket: _Optional[_Union[_types_pb2.Ticket, _Mapping]] = ..., num_pulled: _Optional[int] = ..., num_found: _Optional[int] = ..., num_bytes: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_early_tokens: _Optional[int] = ...) -> None: ...

class PullEarlyRequest(_message.Message):
    __slots__ = ("ticket", "source", "cache_quota", "public_tokens")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    CACHE_QUOTA_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ticket: _types_pb2.Ticket
    source: str
    cache_quota: _types_pb2.CacheQuota
    public_tokens: int
    def __init__(self, ticket: _Optional[_Union[_types_pb2.Ticket, _Mapping]] = ..., source: _Optional[str] = ..., cache_quota: _Optional[_Union[_types_pb2.CacheQuota, _Mapping]] = ..., public_tokens: _Optional[int] = ...) -> None: ...

class PullEarlyResponse(_message.Message):
    __slots__ = ("num_tokens",)
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    def __init__(self, num_tokens: _Optional[int] = ...) -> None: ...

class RestoreRequest(_message.Message):
    __slots__ = ("prefix_hashes", "cache_quota", "num_public_blocks")
    PREFIX_HASHES_FIELD_NUMBER: _ClassVar[int]
    CACHE_QUOTA_FIELD_NUMBER: _ClassVar[int]
    NUM_PUBLIC_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    prefix_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    cache_quota: _types_pb2.CacheQuota
    num_public_blocks: int
    def __init__(self, prefix_hashes: _Optional[_Iterable[bytes]] = ..., cache_quota: _Optional[_Union[_types_pb2.CacheQuota, _Mapping]] = ..., num_public_blocks: _Optional[int] = ...) -> None: ...

class RestoreResponse(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...
