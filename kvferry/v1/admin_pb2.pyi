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

class AuditDeploymentRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AuditDeploymentResponse(_message.Message):
    __slots__ = ("router_id", "requests", "workers")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    requests: _containers.RepeatedCompositeFieldContainer[LiveRequest]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerAudit]
    def __init__(self, router_id: _Optional[str] = ..., requests: _Optional[_Iterable[_Union[LiveRequest, _Mapping]]] = ..., workers: _Optional[_Iterable[_Union[WorkerAudit, _Mapping]]] = ...) -> None: ...

class LiveRequest(_message.Message):
    __slots__ = ("request_id", "stage", "age_s", "decode_worker_id", "num_output_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    stage: str
    age_s: float
    decode_worker_id: str
    num_output_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., stage: _Optional[str] = ..., age_s: _Optional[float] = ..., decode_worker_id: _Optional[str] = ..., num_output_tokens: _Optional[int] = ...) -> None: ...

class WorkerAudit(_message.Message):
    __slots__ = ("worker_id", "epoch", "held", "error", "num_requests")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    held: AuditResponse
    error: str
    num_requests: int
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., held: _Optional[_Union[AuditResponse, _Mapping]] = ..., error: _Optional[str] = ..., num_requests: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("request_id", "state", "num_blocks", "age_s", "router_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    state: str
    num_blocks: int
    age_s: float
    router_id: str
    def __init__(self, request_id: _Optional[str] = ..., state: _Optional[str] = ..., num_blocks: _Optional[int] = ..., age_s: _Optional[float] = ..., router_id: _Optional[str] = ...) -> None: ...
