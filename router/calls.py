"""What the router asks of workers for one request: Reserve, Prefill and Release."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from kvferry.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)
from router.errors import DeadlineExceeded, Overloaded, RequestError, WorkerFailed, WorkerLost
from router.events import Request
from router.worker import Worker
from rpc.channel import Channels

logger = logging.getLogger(__name__)

# Reserving is a look-up on the decode worker; longer means that it is stuck or gone.
RESERVE_TIMEOUT_S = 2.0
RELEASE_TIMEOUT_S = 2.0
AUDIT_TIMEOUT_S = 2.0
# A worker ends a call at its deadline; this much later it is taken for one that does not answer.
DEADLINE_SLACK_S = 2.0

# A decode worker that answers so may be well for the next request; another one is tried for this one.
_TRY_ANOTHER = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    # It has lost its stream to this router, and joins again.
    grpc.StatusCode.FAILED_PRECONDITION,
}


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a request runs, and its right to D's blocks, of which D holds the first `num_held_blocks`."""

    prefill: Worker
    decode: Worker
    lease: common_pb2.Lease
    num_held_blocks: int


class Calls:
    """The calls for one request under one name."""

    def __init__(
        self,
        channels: Channels,
        router_id: str,
        request: Request,
        name: str,
        output_token_ids: Sequence[int] = (),
    ) -> None:
        """name: what the workers call the request. output_token_ids: what others have generated of it."""
        self._channels = channels
        self._router_id = router_id
        self._request = request
        self._name = name
        self._output_token_ids = output_token_ids
        self._sampling = common_pb2.SamplingParams(**request.sampling.to_fields())

    async def reserve(self, decode: Worker) -> decode_pb2.ReserveResponse | None:
        """Asks D for blocks. None where it cannot be asked now; it may have taken them all the same.

        Raises `WorkerFailed` where it refuses for a reason that trying again does not mend.
        """
        request = decode_pb2.ReserveRequest(
            request_id=self._name,
            router_id=self._router_id,
            prompt_token_ids=self._request.prompt_token_ids,
            output_token_ids=self._output_token_ids,
            sampling=self._sampling,
            priority=self._request.priority,
            deadline_s=self._remaining_s(),
            cache_salt=self._request.cache_salt,
        )
        stub = decode_pb2_grpc.DecodeServiceStub(self._channel(decode))
        try:
            response: decode_pb2.ReserveResponse = await stub.Reserve(request, timeout=RESERVE_TIMEOUT_S)
            return response
        except grpc.aio.AioRpcError as error:
            if error.code() not in _TRY_ANOTHER:
                raise WorkerFailed(f"decode worker {decode.worker_id}: {error.details()}") from error
            logger.warning("%s cannot be asked to reserve: %s", decode.worker_id, error.details())
            return None

    def prefill(self, placed: Placed, prefill: Worker, writer: int) -> Any:
        """Has P compute the prompt and push it to D: gRPC's call, which gives `PrefillResponse`s.

        writer: how many others were asked before. Iterating raises `grpc.aio.AioRpcError`.
        """
        request = prefill_pb2.PrefillRequest(
            request_id=self._name,
            prompt_token_ids=self._request.prompt_token_ids,
            output_token_ids=self._output_token_ids,
            sampling=self._sampling,
            priority=self._request.priority,
            deadline_s=self._remaining_s(),
            target=prefill_pb2.HandoffTarget(
                address=placed.decode.registration.address,
                lease=placed.lease,
                num_held_blocks=placed.num_held_blocks,
                writer=writer,
            ),
            cache_salt=self._request.cache_salt,
            router_id=self._router_id,
        )
        stub = prefill_pb2_grpc.PrefillServiceStub(self._channel(prefill))
        return stub.Prefill(request, timeout=self._remaining_s() + DEADLINE_SLACK_S)

    async def release(self, decode: Worker) -> None:
        """Tells D to forget the request. Where that fails, D's own deadline or lost stream does it."""
        stub = decode_pb2_grpc.DecodeServiceStub(self._channel(decode))
        request = decode_pb2.ReleaseRequest(request_ids=[self._name])
        try:
            await stub.Release(request, timeout=RELEASE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            logger.warning(
                "%s could not be told to release %s: %s",
                decode.worker_id,
                self._name,
                error.details(),
            )

    def _channel(self, worker: Worker) -> grpc.aio.Channel:
        return self._channels.to(worker.registration.address)

    def _remaining_s(self) -> float:
        return max(0.0, self._request.deadline_s - asyncio.get_running_loop().time())


async def audit_worker(worker: Worker, channels: Channels) -> admin_pb2.WorkerAudit:
    """What a worker says that it holds; why it does not say it, where that fails."""
    audit = admin_pb2.WorkerAudit(
        worker_id=worker.worker_id, epoch=worker.registration.epoch, num_requests=worker.num_requests
    )
    stub = admin_pb2_grpc.WorkerServiceStub(channels.to(worker.registration.address))
    try:
        held = await stub.Audit(admin_pb2.AuditRequest(), timeout=AUDIT_TIMEOUT_S)
        audit.held.CopyFrom(held)
    except grpc.aio.AioRpcError as error:
        audit.error = f"{error.code().name}: {error.details()}"
    return audit


def prefill_error(prefill: Worker, error: grpc.aio.AioRpcError, retry_after_s: int) -> RequestError:
    """What it means that P's call ended so."""
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Overloaded("the queue of every prefill worker is full", retry_after_s)
    kinds: dict[grpc.StatusCode, type[RequestError]] = {
        grpc.StatusCode.UNAVAILABLE: WorkerLost,
        grpc.StatusCode.CANCELLED: WorkerLost,
        grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    }
    return kinds.get(error.code(), WorkerFailed)(f"prefill worker {prefill.worker_id}: {error.details()}")
