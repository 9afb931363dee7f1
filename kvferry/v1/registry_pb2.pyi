from kvferry.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JoinRequest(_message.Message):
    __slots__ = ("registration", "load", "step")
    REGISTRATION_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    registration: Registration
    load: LoadReport
    step: StepUpdate
    def __init__(self, registration: _Optional[_Union[Registration, _Mapping]] = ..., load: _Optional[_Union[LoadReport, _Mapping]] = ..., step: _Optional[_Union[StepUpdate, _Mapping]] = ...) -> None: ...

class Registration(_message.Message):
    __slots__ = ("worker_id", "epoch", "role", "address", "capabilities")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    role: _common_pb2.Role
    address: str
    capabilities: Capabilities
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., role: _Optional[_Union[_common_pb2.Role, str]] = ..., address: _Optional[str] = ..., capabilities: _Optional[_Union[Capabilities, _Mapping]] = ...) -> None: ...

class Capabilities(_message.Message):
    __slots__ = ("model", "model_digest", "tokenizer_digest", "dtype", "block_size", "num_layers", "num_kv_heads", "head_dim", "kv_layout", "tensor_parallel_size", "hash_scheme", "codec", "protocol_version", "num_blocks")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    HASH_SCHEME_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_digest: str
    tokenizer_digest: str
    dtype: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_layout: str
    tensor_parallel_size: int
    hash_scheme: str
    codec: str
    protocol_version: int
    num_blocks: int
    def __init__(self, model: _Optional[str] = ..., model_digest: _Optional[str] = ..., tokenizer_digest: _Optional[str] = ..., dtype: _Optional[str] = ..., block_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., kv_layout: _Optional[str] = ..., tensor_parallel_size: _Optional[int] = ..., hash_scheme: _Optional[str] = ..., codec: _Optional[str] = ..., protocol_version: _Optional[int] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class LoadReport(_message.Message):
    __slots__ = ("blocks", "num_waiting", "num_running", "num_pending_tokens", "counters", "block_changes")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_PENDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_CHANGES_FIELD_NUMBER: _ClassVar[int]
    blocks: _common_pb2.BlockCounts
    num_waiting: int
    num_running: int
    num_pending_tokens: int
    counters: _containers.ScalarMap[str, float]
    block_changes: BlockChanges
    def __init__(self, blocks: _Optional[_Union[_common_pb2.BlockCounts, _Mapping]] = ..., num_waiting: _Optional[int] = ..., num_running: _Optional[int] = ..., num_pending_tokens: _Optional[int] = ..., counters: _Optional[_Mapping[str, float]] = ..., block_changes: _Optional[_Union[BlockChanges, _Mapping]] = ...) -> None: ...

class BlockChanges(_message.Message):
    __slots__ = ("sequence", "is_snapshot", "added", "removed")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    IS_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    is_snapshot: bool
    added: bytes
    removed: bytes
    def __init__(self, sequence: _Optional[int] = ..., is_snapshot: _Optional[bool] = ..., added: _Optional[bytes] = ..., removed: _Optional[bytes] = ...) -> None: ...

class StepUpdate(_message.Message):
    __slots__ = ("generations", "output_indices", "token_ids", "logprobs", "ended")
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_INDICES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    output_indices: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[StepLogprobs]
    ended: _containers.RepeatedCompositeFieldContainer[Ended]
    def __init__(self, generations: _Optional[_Iterable[int]] = ..., output_indices: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[StepLogprobs, _Mapping]]] = ..., ended: _Optional[_Iterable[_Union[Ended, _Mapping]]] = ...) -> None: ...

class StepLogprobs(_message.Message):
    __slots__ = ("row", "logprobs")
    ROW_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    row: int
    logprobs: _common_pb2.TokenLogprobs
    def __init__(self, row: _Optional[int] = ..., logprobs: _Optional[_Union[_common_pb2.TokenLogprobs, _Mapping]] = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ("generation", "finish_reason", "error", "num_output_tokens")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    finish_reason: _common_pb2.FinishReason
    error: str
    num_output_tokens: int
    def __init__(self, generation: _Optional[int] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., error: _Optional[str] = ..., num_output_tokens: _Optional[int] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("router_id", "incompatible", "resend_blocks")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    INCOMPATIBLE_FIELD_NUMBER: _ClassVar[int]
    RESEND_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    incompatible: str
    resend_blocks: bool
    def __init__(self, router_id: _Optional[str] = ..., incompatible: _Optional[str] = ..., resend_blocks: _Optional[bool] = ...) -> None: ...
