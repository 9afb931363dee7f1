from kvferry.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HandoffTarget(_message.Message):
    __slots__ = ("address", "lease", "num_held_blocks", "writer")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    address: str
    lease: _common_pb2.Lease
    num_held_blocks: int
    writer: int
    def __init__(self, address: _Optional[str] = ..., lease: _Optional[_Union[_common_pb2.Lease, _Mapping]] = ..., num_held_blocks: _Optional[int] = ..., writer: _Optional[int] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "sampling", "priority", "deadline_s", "target", "cache_salt", "output_token_ids", "router_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.SamplingParams
    priority: int
    deadline_s: float
    target: HandoffTarget
    cache_salt: str
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    router_id: str
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., priority: _Optional[int] = ..., deadline_s: _Optional[float] = ..., target: _Optional[_Union[HandoffTarget, _Mapping]] = ..., cache_salt: _Optional[str] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., router_id: _Optional[str] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("first_token", "handed_off")
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    HANDED_OFF_FIELD_NUMBER: _ClassVar[int]
    first_token: FirstToken
    handed_off: HandedOff
    def __init__(self, first_token: _Optional[_Union[FirstToken, _Mapping]] = ..., handed_off: _Optional[_Union[HandedOff, _Mapping]] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("token_id", "logprobs", "finish_reason", "prefill_started_s", "transfer_started_s", "first_token_s", "num_cached_tokens")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    PREFILL_STARTED_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_STARTED_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprobs: _common_pb2.TokenLogprobs
    finish_reason: _common_pb2.FinishReason
    prefill_started_s: float
    transfer_started_s: float
    first_token_s: float
    num_cached_tokens: int
    def __init__(self, token_id: _Optional[int] = ..., logprobs: _Optional[_Union[_common_pb2.TokenLogprobs, _Mapping]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., prefill_started_s: _Optional[float] = ..., transfer_started_s: _Optional[float] = ..., first_token_s: _Optional[float] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class HandedOff(_message.Message):
    __slots__ = ("transfer_ended_s", "num_bytes")
    TRANSFER_ENDED_S_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    transfer_ended_s: float
    num_bytes: int
    def __init__(self, transfer_ended_s: _Optional[float] = ..., num_bytes: _Optional[int] = ...) -> None: ...
