"""The prefill worker's calls: from protos to the loop and back, and nothing else."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from pydantic import ValidationError

from engine.engine import ModelInfo
from engine.finish import FinishReason
from kv_transfer.reservation import Lease
from kv_transfer.transport import Target, TransferFailed
from kvferry.sampling import SamplingParams
from kvferry.v1 import admin_pb2, prefill_pb2_grpc, registry_pb2
from kvferry.v1 import prefill_pb2 as pb
from prefill_worker.loop import FirstToken, PrefillFailed, PrefillJob, PrefillLoop
from rpc.errors import Refused
from scheduling.allocator import BlockAllocator
from scheduling.block_feed import BlockChanges
from scheduling.block_hash import BlockHashes
from scheduling.sequence import Sequence
from worker import reports
from worker.requests import tokens_of


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """PrefillService over a loop."""

    def __init__(self, loop: PrefillLoop, model: ModelInfo, block_size: int) -> None:
        self._loop = loop
        self._model = model
        self._block_size = block_size

    async def Prefill(
        self, request: pb.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.PrefillResponse]:
        job = self._submit(request)
        arrived_s = job.sequence.arrived_s
        deadline_s = arrived_s + request.deadline_s
        try:
            # The time-outs are around the waits, never around a yield, where one would strike gRPC's await.
            async with asyncio.timeout_at(deadline_s):
                first = await job.first_token
            yield pb.PrefillResponse(first_token=_first_token(job, first))
            if first.finish_reason is not None:
                return
            handoff = job.handoff
            assert handoff is not None
            async with asyncio.timeout_at(deadline_s):
                ended_s = await handoff.finish(first.token.token_id)
            yield pb.PrefillResponse(
                handed_off=pb.HandedOff(transfer_ended_s=ended_s - arrived_s, num_bytes=handoff.num_bytes)
            )
        except TimeoutError:
            raise Refused(
                grpc.StatusCode.DEADLINE_EXCEEDED, f"deadline exceeded while {stage(job)}"
            ) from None
        except TransferFailed as error:
            raise Refused(
                grpc.StatusCode.UNAVAILABLE, f"KV transfer to {job.target.address}: {error}"
            ) from error
        except PrefillFailed as error:
            raise Refused(grpc.StatusCode.INTERNAL, str(error)) from error
        finally:
            self._loop.release(job)

    def _submit(self, request: pb.PrefillRequest) -> PrefillJob:
        job = self._from_proto(request)
        try:
            accepted = self._loop.submit(job)
        except ValueError as error:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, f"prompt_token_ids: {error}") from error
        except KeyError as error:
            raise Refused(grpc.StatusCode.ALREADY_EXISTS, f"request_id: {error} is held already") from error
        if not accepted:
            raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "the prefill queue is full")
        return job

    def _from_proto(self, request: pb.PrefillRequest) -> PrefillJob:
        tokens = tokens_of(request, self._model.vocab_size)
        try:
            sampling = SamplingParams.from_message(request.sampling)
        except ValidationError as error:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, f"sampling: {error}") from error
        if sampling.max_tokens is None or sampling.seed is None:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "sampling: max_tokens and seed must be set")
        if request.target.num_held_blocks > len(tokens) // self._block_size:
            raise Refused(
                grpc.StatusCode.INVALID_ARGUMENT, "target.num_held_blocks: more than the prompt's full blocks"
            )
        return PrefillJob(
            sequence=Sequence(
                request_id=request.request_id,
                tokens=tokens,
                num_prompt_tokens=len(request.prompt_token_ids),
                priority=request.priority,
                arrived_s=asyncio.get_running_loop().time(),
                hashes=BlockHashes(self._model.model_digest, request.cache_salt, self._block_size),
            ),
            sampling=sampling,
            target=_target(request.target),
            router_id=request.router_id,
            num_held_blocks=request.target.num_held_blocks,
        )


def _target(target: pb.HandoffTarget) -> Target:
    lease = target.lease
    return Target(
        target.address,
        Lease(lease.request_id, lease.epoch, lease.generation, lease.secret),
        target.writer,
    )


def _first_token(job: PrefillJob, first: FirstToken) -> pb.FirstToken:
    now_s = asyncio.get_running_loop().time()
    arrived_s = job.sequence.arrived_s
    assert job.started_s is not None
    message = pb.FirstToken(
        token_id=first.token.token_id,
        finish_reason=_reason_name(first.finish_reason),
        prefill_started_s=job.started_s - arrived_s,
        first_token_s=now_s - arrived_s,
        num_cached_tokens=job.num_cached_tokens,
    )
    if job.handoff is not None and job.handoff.started_s is not None:
        message.transfer_started_s = job.handoff.started_s - arrived_s
    if first.token.logprob is not None:
        message.logprobs.logprob = first.token.logprob
        for token_id, logprob in first.token.top_logprobs:
            message.logprobs.top.add(token_id=token_id, logprob=logprob)
    return message


def _reason_name(reason: FinishReason | None) -> str:
    return f"FINISH_REASON_{reason.name}" if reason else "FINISH_REASON_UNSPECIFIED"


def stage(job: PrefillJob) -> str:
    """Where a job stands: WAITING, PREFILLING or HANDING_OFF."""
    if job.first_token.done():
        return "HANDING_OFF"
    return "WAITING" if job.started_s is None else "PREFILLING"


def load_report(
    loop: PrefillLoop, allocator: BlockAllocator, changes: BlockChanges | None
) -> registry_pb2.LoadReport:
    """What a router is told at every heartbeat."""
    num_waiting = loop.scheduler.num_waiting
    return reports.load_report(
        allocator,
        changes,
        loop.counters,
        num_waiting=num_waiting,
        num_running=len(loop.jobs) - num_waiting,
        num_pending_tokens=loop.scheduler.num_pending_tokens,
    )


def audit(loop: PrefillLoop, allocator: BlockAllocator) -> admin_pb2.AuditResponse:
    """Everything that is held here."""
    return reports.audit(
        allocator,
        {
            name: reports.Held(stage(job), job.sequence.arrived_s, job.router_id)
            for name, job in loop.jobs.items()
        },
    )
