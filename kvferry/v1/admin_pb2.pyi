from kvferry.v1 import common_pb2 as _common_pb2
from kvferry.v1 import registry_pb2 as _registry_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListWorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers", "model", "num_requests", "num_queued")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    model: str
    num_requests: int
    num_queued: int
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., model: _Optional[str] = ..., num_requests: _Optional[int] = ..., num_queued: _Optional[int] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("registration", "load", "report_age_s", "incompatible")
    REGISTRATION_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    REPORT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    INCOMPATIBLE_FIELD_NUMBER: _ClassVar[int]
    registration: _registry_pb2.Registration
    load: _registry_pb2.LoadReport
    report_age_s: float
    incompatible: str
    def __init__(self, registration: _Optional[_Union[_registry_pb2.Registration, _Mapping]] = ..., load: _Optional[_Union[_registry_pb2.LoadReport, _Mapping]] = ..., report_age_s: _Optional[float] = ..., incompatible: _Optional[str] = ...) -> None: ...

class AuditRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AuditResponse(_message.Message):
    __slots__ = ("blocks", "holdings")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOLDINGS_FIELD_NUMBER: _ClassVar[int]
    blocks: _common_pb2.BlockCounts
    holdings: _containers.RepeatedCompositeFieldContainer[Holding]
    def __init__(self, blocks: _Optional[_Union[_common_pb2.BlockCounts, _Mapping]] = ..., holdings: _Optional[_Iterable[_Union[Holding, _Mapping]]] = ...) -> None: ...

class Holding(_message.Message):
    __slots__ = ("request_id", "state", "num_blocks", "age_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    state: str
    num_blocks: int
    age_s: float
    def __init__(self, request_id: _Optional[str] = ..., state: _Optional[str] = ..., num_blocks: _Optional[int] = ..., age_s: _Optional[float] = ...) -> None: ...
