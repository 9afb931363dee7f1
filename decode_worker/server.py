"""The decode worker's calls: from protos to the loop and back, and nothing else."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
from pydantic import ValidationError

from decode_worker.loop import DecodeLoop, DecodeRequest
from decode_worker.streams import End, StepTokens
from engine.engine import ModelInfo, SampledToken
from kv_transfer.receiver import Receiver
from kvferry.sampling import SamplingParams
from kvferry.v1 import admin_pb2, common_pb2, decode_pb2_grpc, registry_pb2
from kvferry.v1 import decode_pb2 as pb
from rpc.errors import Refused
from scheduling.allocator import BlockAllocator
from scheduling.block_feed import BlockChanges
from scheduling.block_hash import BlockHashes
from scheduling.sequence import blocks_for
from worker import reports
from worker.requests import tokens_of


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """DecodeService over a loop."""

    def __init__(
        self,
        loop: DecodeLoop,
        allocator: BlockAllocator,
        model: ModelInfo,
        block_size: int,
        is_joined: Callable[[str], bool],
    ) -> None:
        """`is_joined(router_id)`: whether that router hears this worker's tokens."""
        self._loop = loop
        self._allocator = allocator
        self._model = model
        self._block_size = block_size
        self._is_joined = is_joined

    async def Reserve(
        self, request: pb.ReserveRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ReserveResponse:
        if not self._is_joined(request.router_id):
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"router_id: {request.router_id} has no open Join stream here",
            )
        try:
            hashes = BlockHashes(self._model.model_digest, request.cache_salt, self._block_size)
            decoding = _from_proto(request, self._model.vocab_size, hashes)
            self._check_size(decoding)
            reservation = self._loop.reserve(decoding)
        except ValidationError as error:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, f"sampling: {error}") from error
        except KeyError as error:
            raise Refused(grpc.StatusCode.ALREADY_EXISTS, f"request_id: {error} is held already") from error
        if reservation is None:
            needed = blocks_for(len(decoding.tokens) + 1, self._block_size)
            free = self._allocator.num_available
            return pb.ReserveResponse(no_room=pb.NoRoom(needed_blocks=needed, free_blocks=free))
        lease = reservation.lease
        return pb.ReserveResponse(
            lease=common_pb2.Lease(
                request_id=lease.request_id,
                epoch=lease.epoch,
                generation=lease.generation,
                secret=lease.secret,
            ),
            num_held_blocks=reservation.num_held_blocks,
        )

    def _check_size(self, request: DecodeRequest) -> None:
        assert request.sampling.max_tokens is not None
        needed = blocks_for(request.num_prompt_tokens + request.sampling.max_tokens, self._block_size)
        total = self._allocator.counts.total
        if needed > total:
            raise Refused(
                grpc.StatusCode.INVALID_ARGUMENT, f"max_tokens: needs {needed} blocks; there are {total}"
            )

    async def Release(
        self, request: pb.ReleaseRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ReleaseResponse:
        for request_id in request.request_ids:
            self._loop.release(request_id)
        return pb.ReleaseResponse()


def _from_proto(request: pb.ReserveRequest, vocab_size: int, hashes: BlockHashes) -> DecodeRequest:
    tokens = tokens_of(request, vocab_size)
    sampling = SamplingParams.from_message(request.sampling)
    if sampling.max_tokens is None or sampling.seed is None:
        raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "sampling: max_tokens and seed must be set")
    now_s = asyncio.get_running_loop().time()
    return DecodeRequest(
        request_id=request.request_id,
        router_id=request.router_id,
        tokens=tokens,
        num_prompt_tokens=len(request.prompt_token_ids),
        sampling=sampling,
        priority=request.priority,
        arrived_s=now_s,
        deadline_s=now_s + request.deadline_s,
        hashes=hashes,
    )


def load_report(
    loop: DecodeLoop, allocator: BlockAllocator, receiver: Receiver, changes: BlockChanges | None
) -> registry_pb2.LoadReport:
    """What a router is told at every heartbeat."""
    refused = {f"blocks_refused_{reason.name.lower()}": count for reason, count in receiver.refused.items()}
    num_running = loop.scheduler.num_running
    return reports.load_report(
        allocator,
        changes,
        {**loop.counters, **refused, "blocks_received": receiver.num_blocks_received},
        num_waiting=len(loop.requests) - num_running,
        num_running=num_running,
    )


def audit(loop: DecodeLoop, allocator: BlockAllocator) -> admin_pb2.AuditResponse:
    """Everything that is held here."""
    states = {}
    for request in loop.requests.values():
        reservation = loop.reservations.get(request.request_id)
        assert reservation is not None
        states[request.request_id] = reports.Held(
            reservation.state.name, request.arrived_s, request.router_id
        )
    return reports.audit(allocator, states)


def step_update(tokens: StepTokens) -> registry_pb2.StepUpdate:
    """What a step brought for one router, as a message."""
    return registry_pb2.StepUpdate(
        generations=tokens.generations,
        output_indices=tokens.output_indices,
        token_ids=tokens.token_ids,
        logprobs=[registry_pb2.StepLogprobs(row=row, logprobs=_logprobs(t)) for row, t in tokens.logprobs],
        ended=[_ended(end) for end in tokens.ended],
    )


def _logprobs(token: SampledToken) -> common_pb2.TokenLogprobs:
    top = [common_pb2.TopLogprob(token_id=i, logprob=value) for i, value in token.top_logprobs]
    return common_pb2.TokenLogprobs(logprob=token.logprob, top=top)


def _ended(end: End) -> registry_pb2.Ended:
    return registry_pb2.Ended(
        generation=end.generation,
        finish_reason=f"FINISH_REASON_{end.reason.name}" if end.reason else "FINISH_REASON_UNSPECIFIED",
        num_output_tokens=end.num_output_tokens,
        error=end.error,
    )
