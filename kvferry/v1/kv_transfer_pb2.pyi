from kvferry.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RefusalReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REFUSAL_REASON_UNSPECIFIED: _ClassVar[RefusalReason]
    REFUSAL_REASON_CHECKSUM: _ClassVar[RefusalReason]
    REFUSAL_REASON_GENERATION: _ClassVar[RefusalReason]
    REFUSAL_REASON_SHAPE: _ClassVar[RefusalReason]
    REFUSAL_REASON_DUPLICATE: _ClassVar[RefusalReason]
REFUSAL_REASON_UNSPECIFIED: RefusalReason
REFUSAL_REASON_CHECKSUM: RefusalReason
REFUSAL_REASON_GENERATION: RefusalReason
REFUSAL_REASON_SHAPE: RefusalReason
REFUSAL_REASON_DUPLICATE: RefusalReason

class PushRequest(_message.Message):
    __slots__ = ("header", "blocks", "end", "shared_blocks")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    SHARED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    header: PushHeader
    blocks: Blocks
    end: PushEnd
    shared_blocks: SharedBlocks
    def __init__(self, header: _Optional[_Union[PushHeader, _Mapping]] = ..., blocks: _Optional[_Union[Blocks, _Mapping]] = ..., end: _Optional[_Union[PushEnd, _Mapping]] = ..., shared_blocks: _Optional[_Union[SharedBlocks, _Mapping]] = ...) -> None: ...

class PushHeader(_message.Message):
    __slots__ = ("lease", "block_bytes", "num_blocks", "shared_memory", "writer")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    lease: _common_pb2.Lease
    block_bytes: int
    num_blocks: int
    shared_memory: SharedMemory
    writer: int
    def __init__(self, lease: _Optional[_Union[_common_pb2.Lease, _Mapping]] = ..., block_bytes: _Optional[int] = ..., num_blocks: _Optional[int] = ..., shared_memory: _Optional[_Union[SharedMemory, _Mapping]] = ..., writer: _Optional[int] = ...) -> None: ...

class SharedMemory(_message.Message):
    __slots__ = ("boot_id", "pid", "fd", "name", "num_bytes")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    FD_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    pid: int
    fd: int
    name: str
    num_bytes: int
    def __init__(self, boot_id: _Optional[str] = ..., pid: _Optional[int] = ..., fd: _Optional[int] = ..., name: _Optional[str] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class Blocks(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[Block]
    def __init__(self, blocks: _Optional[_Iterable[_Union[Block, _Mapping]]] = ...) -> None: ...

class Block(_message.Message):
    __slots__ = ("index", "generation", "checksum", "layer_begin", "layer_end", "head_begin", "head_end", "data")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    LAYER_BEGIN_FIELD_NUMBER: _ClassVar[int]
    LAYER_END_FIELD_NUMBER: _ClassVar[int]
    HEAD_BEGIN_FIELD_NUMBER: _ClassVar[int]
    HEAD_END_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    index: int
    generation: int
    checksum: int
    layer_begin: int
    layer_end: int
    head_begin: int
    head_end: int
    data: bytes
    def __init__(self, index: _Optional[int] = ..., generation: _Optional[int] = ..., checksum: _Optional[int] = ..., layer_begin: _Optional[int] = ..., layer_end: _Optional[int] = ..., head_begin: _Optional[int] = ..., head_end: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class SharedBlocks(_message.Message):
    __slots__ = ("generation", "indices", "source_blocks", "checksums")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    indices: _containers.RepeatedScalarFieldContainer[int]
    source_blocks: _containers.RepeatedScalarFieldContainer[int]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, generation: _Optional[int] = ..., indices: _Optional[_Iterable[int]] = ..., source_blocks: _Optional[_Iterable[int]] = ..., checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class PushEnd(_message.Message):
    __slots__ = ("first_token_id",)
    FIRST_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    first_token_id: int
    def __init__(self, first_token_id: _Optional[int] = ...) -> None: ...

class PushResponse(_message.Message):
    __slots__ = ("opened", "refused", "completed")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    opened: PushOpened
    refused: BlockRefused
    completed: PushCompleted
    def __init__(self, opened: _Optional[_Union[PushOpened, _Mapping]] = ..., refused: _Optional[_Union[BlockRefused, _Mapping]] = ..., completed: _Optional[_Union[PushCompleted, _Mapping]] = ...) -> None: ...

class PushOpened(_message.Message):
    __slots__ = ("takes_shared_memory", "landed")
    TAKES_SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    LANDED_FIELD_NUMBER: _ClassVar[int]
    takes_shared_memory: bool
    landed: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, takes_shared_memory: _Optional[bool] = ..., landed: _Optional[_Iterable[int]] = ...) -> None: ...

class BlockRefused(_message.Message):
    __slots__ = ("index", "reason")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    index: int
    reason: RefusalReason
    def __init__(self, index: _Optional[int] = ..., reason: _Optional[_Union[RefusalReason, str]] = ...) -> None: ...

class PushCompleted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
